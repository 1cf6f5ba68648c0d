"""The config of a model: which kind stands in each slot, how the layers follow each other, and what fits together."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lm.errors import ConfigError
from lm.nn import slots as slots
from lm.nn.block import SequentialConfig
from lm.nn.block_base import BlockConfig
from lm.nn.embed import EmbedConfig
from lm.nn.ffn.base import FFNConfig
from lm.nn.ffn.none import NoFFNConfig
from lm.nn.head import OF_HEAD, HeadConfig
from lm.nn.init import InitConfig
from lm.nn.mixers.base import AttentionConfig, MixerConfig, RecurrentConfig
from lm.nn.mixers.both import BothConfig
from lm.nn.mixers.none import NoMixerConfig
from lm.nn.norm import NormConfig
from lm.nn.parametrization import Growth, ParametrizationConfig, StandardConfig
from lm.nn.parts import ATTENDING, RECURRENT, BlockParts, SlotOfLayer
from lm.nn.position.base import Dims, PositionConfig
from lm.nn.residual import PlainConfig, ResidualConfig
from lm.schema import MOST, MOST_LAYERS, Slot, Tree, from_tree
from lm.spelling import did_you_mean

if TYPE_CHECKING:
    from lm.nn.stack import Stack

ModelKind = Literal["decoder", "encoder", "encoder_decoder"]


class ModelConfig(Slot):
    """What all models are configured by."""

    reads_source: ClassVar[bool] = False
    """By an encoder, which attends in all layers."""

    vocab_size: int | None = Field(None, gt=0, le=MOST)
    """Rows of the embedding. null: the tokenizer's size, rounded up to a multiple of 64."""
    max_seq_len: int | None = Field(None, gt=0, le=MOST)
    """Longest sequence. null: data.seq_len."""
    d_model: int = Field(gt=0, le=MOST)
    """Width of the residual stream."""
    n_layers: int = Field(gt=0, le=MOST_LAYERS)
    """Number of blocks; of an encoder-decoder, the decoder's."""
    norm: NormConfig
    position: PositionConfig
    attention: AttentionConfig
    recurrent: RecurrentConfig | None = None
    """What layers mix with that `pattern` calls recurrent. null: there are none."""
    pattern: list[SlotOfLayer] = Field(["attention"], min_length=1)
    """Which slot mixes the tokens in layer 0, 1, ..., repeated over the layers; an encoder has attention in all. both: both side by
    side, reading one norm (Falcon-H1); ffn: a layer of the feed-forward alone, of block=single."""
    ffn: FFNConfig
    block: BlockConfig = SequentialConfig()
    residual: ResidualConfig = PlainConfig()
    embed: EmbedConfig = EmbedConfig()
    head: HeadConfig = HeadConfig()
    init: InitConfig = InitConfig()
    parametrization: ParametrizationConfig = StandardConfig()
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping an element of the embedding or of a sublayer's output."""

    @abstractmethod
    def build(self) -> "Stack":
        """Returns the model, an LM, without drawing its weights."""

    @model_validator(mode="after")
    def _slots_fit(self) -> Self:
        self.attention.require(self.d_model, self.position)
        self.attention.require_layers(self.attending(), self.drafts())
        self.position.require(self.attention.rotary_width(self.d_model), self.attention.whence(self.d_model))
        self.position.require_windowed(self.attention.windowed_width(self.d_model), self.attention.whence(self.d_model))
        self.position.require_layers(self.drafts())
        self.block.require(self.norm, self.ffn, self.recurrent is not None)
        self.residual.require(self.norm, self.block.kind, self.drafts(), self.n_layers)
        self.ffn.require([layer for layer in range(self.n_layers) if self.block.feeds(self.slot(layer))])
        kinds = (self.kind, self.block.kind, self.residual.kind)
        self.embed.require(*kinds, self.drafts(), self.d_model, self.parametrization.kind)
        if self.drafts() and self.head.labels is not None:
            raise ValueError("mtp predicts tokens, and head.labels are none. Set mtp=null, or head.labels=null.")
        used = {self.slot(layer) for layer in range(self.n_layers)}
        if self.recurrent is None and not {*RECURRENT}.isdisjoint(self.pattern):
            raise ValueError(f"pattern={self._shown()} names recurrent layers, and recurrent is null. Choose one, as in"
                             " model/recurrent=short_conv, or drop them.")  # fmt: skip
        if self.recurrent is not None and used.isdisjoint(RECURRENT):
            raise ValueError(f"recurrent={self.recurrent.kind} mixes in no layer of {self.n_layers} with pattern={self._shown()}."
                             " Set pattern=[recurrent,attention], say, or recurrent=null.")  # fmt: skip
        cut = f", which n_layers={self.n_layers} cuts short," if len(self.pattern) > self.n_layers else ""
        self.block.require_slots(used, self._shown() + cut)
        if used.isdisjoint(ATTENDING) and self.position.acts != "embed":
            raise ValueError(f"position={self.position.kind} acts within attention, and pattern={self._shown()} leaves none in"
                             f" {self.n_layers} layers. Use position=none, or name attention in the pattern.")  # fmt: skip
        self.written_out()
        return self

    def sized(self, n_tokens: int, seq_len: int) -> Self:
        """Returns this config with null sizes set: vocab_size to n_tokens, rounded up to 64s for fast kernels; max_seq_len to seq_len."""
        return self.replace(vocab_size=self.vocab_size or -(-n_tokens // 64) * 64, max_seq_len=self.max_seq_len or seq_len)

    def continues(self) -> bool:
        """Whether it goes on with texts, as an encoder, a classifier and a model that reads the mean of a text do not."""
        return self.kind != "encoder" and self.head.labels is None and self.head.pooling == "token"

    def drafts(self) -> bool:
        """Whether there are blocks beyond the last layer."""
        return False

    def narrowed(self) -> int | None:
        """Returns to how many numbers the head narrows hidden states, as its matrix is the embedding, or has labels in its place, and no
        transform stands before them; None: it does not."""
        narrow = self.embed.factorized
        if narrow is None or not (self.head.tied or (self.head.labels is not None and self.head.transform is None)):
            return None
        return narrow.width

    def new_in_head(self, before: "ModelConfig") -> set[str]:
        """Returns the names of the head's weights that have another meaning in this model, which tells other things apart than the one
        before; none where both tell the same."""
        found = self.head.unlike(before.head)
        return found | OF_HEAD if found and self.narrowed() != before.narrowed() else found

    def growth(self) -> Growth:
        """Returns the size of this model as multiples of the parametrization's base size."""
        return self.parametrization.growth(self.d_model, self.n_layers * self.residual.passes(), self.attention.score_width(self.d_model))

    def written_out(self) -> Self:
        """Returns the config in the standard parametrization that computes the same, with the multipliers of its own one as options.

        Raises ValueError where a slot has no option for a multiplier.
        """
        if self.parametrization == StandardConfig():
            return self
        growth, tree, kind = self.growth(), self.tree(), self.parametrization.kind
        tree["parametrization"] = {"kind": "standard"}
        tree["head"]["scale"] /= growth.width
        if growth.depth != 1:
            if "residual_scale" not in tree["block"]:
                raise ValueError(f"block={self.block.kind} has no residual_scale, which parametrization={kind} sets. Use block=sequential.")
            tree["block"]["residual_scale"] /= growth.depth
        if growth.head != 1:
            if self.attention.rotary_width(self.d_model) != self.attention.windowed_width(self.d_model):
                said = "for heads of one width, and attention.global_heads.head_dim is another"
                raise ValueError(f"parametrization={kind} sets attention.scale by base_head_dim {said}. Leave one out.")
            if tree["attention"].get("scale", "none") is not None:
                raise ValueError(
                    f"parametrization={kind} sets attention.scale by base_head_dim, and it is given, or has no place. Leave one out."
                )
            tree["attention"]["scale"] = (self.attention.score_width(self.d_model) * growth.head) ** -0.5
        return from_tree(type(self), tree)

    def why_not_context_parallel(self, n: int) -> str | None:
        """Returns why n ranks cannot hold a row in slices, with the remedy; None where they can."""
        mixers = [mixer for mixer in (self.recurrent, self.attention) if mixer is not None]
        found = [mixer.why_not_context_parallel(n) for mixer in mixers]
        found += [part.why_not_context_parallel() for part in (self.position, self.ffn, self.block, self.embed)]
        return next(filter(None, found), None)

    def why_not_tensor_parallel(self, n: int) -> str | None:
        """Returns why n ranks cannot hold matrices in slices, with the remedy; None where they can."""
        return self.attention.why_not_tensor_parallel(n) or self.ffn.why_not_tensor_parallel(self.d_model, n)

    def _shown(self) -> str:
        return f"[{','.join(self.pattern)}]"

    def slot(self, layer: int) -> SlotOfLayer:
        """Returns the slot that mixes the tokens in this layer, or ffn where none does."""
        return self.pattern[layer % len(self.pattern)]

    def parts(self, layer: int, cross: bool = False, n_layers: int | None = None) -> BlockParts:
        """Returns the configs that the block of this layer is built of.  cross: with cross-attention.  n_layers: as of `dims`."""
        slot, n = self.slot(layer), n_layers or self.n_layers
        return BlockParts(
            layer=layer,
            norm=self.norm,
            slot=slot,
            mixer=self._mixer(slot, layer, n),
            cross=self.attention.cross() if cross else None,
            ffn=self.ffn.in_layer(layer, n) if self.block.feeds(slot) else NoFFNConfig(),
            residual=self.residual,
            d_model=self.d_model,
            dropout=self.dropout,
            vocab_size=self.vocab_size or 0,
            n_layers=n,
            per_layer=self.embed.per_layer,
        )

    def _mixer(self, slot: SlotOfLayer, layer: int, n_layers: int) -> MixerConfig:
        if slot == "ffn":
            return NoMixerConfig()
        if slot == "recurrent":
            assert self.recurrent is not None
            return self.recurrent
        attention = self.attention.in_layer(layer, self.attending(n_layers))
        if slot == "attention":
            return attention
        assert self.recurrent is not None
        scales = {f"{name}_scale": self.block.scale_of(name) for name in ("attention", "recurrent")}
        return BothConfig(attention=attention, recurrent=self.recurrent, **scales)

    def dims(self, causal: bool, n_layers: int | None = None) -> Dims:
        """Returns the dimensions that the position of a stack may need to know.  n_layers: of this stack; None: of the model's."""
        assert self.max_seq_len is not None
        return Dims(
            d_model=self.embed.sum_width(self.d_model),
            n_heads=self.attention.n_heads,
            rotary=self.attention.rotary_width(self.d_model),
            max_seq_len=self.max_seq_len,
            causal=causal,
            window=self.attention.layer_window,
            n_layers=n_layers or self.n_layers,
            windowed=self.attention.windowed_width(self.d_model),
        )

    def attending(self, n_layers: int | None = None) -> list[int]:
        """Returns the layers that attend.  n_layers: as of `dims`."""
        return [layer for layer in range(n_layers or self.n_layers) if self.slot(layer) in ATTENDING]

    def implied(self) -> Tree:
        """Returns, by dotted path, what options mean where that is not the value that they hold, such as what null stands for."""
        layers = list(range(self.n_layers)) if self.reads_source else self.attending()
        slots = {"attention": self.attention.implied(self.d_model, layers), "ffn": self.ffn.implied(self.d_model)}
        if self.recurrent is not None:
            slots["recurrent"] = self.recurrent.implied()
        windows = any(self.attention.layer_window(layer) is not None for layer in layers)
        slots["position"] = self.position.implied(self.n_layers, windows)
        pattern = shortest([self.slot(layer) for layer in range(self.n_layers)])
        return {"pattern": pattern, **{f"{slot}.{key}": value for slot, values in slots.items() for key, value in values.items()}}


def model_config(tree: Tree, where: str = "") -> ModelConfig:
    """Returns the config of the kind that `tree` names; raises ConfigError as `from_tree`."""
    from lm.nn import transformer as transformer  # which defines the kinds, from the classes here

    kinds = ModelConfig.kinds()
    kind = str(tree.get("kind"))
    if kind not in kinds:
        raise ConfigError(f"{where}{': ' if where else ''}model.kind: {kind!r} is not an option. {did_you_mean(kind, kinds)}")
    return from_tree(kinds[kind], tree, where)


def shortest(layers: Sequence[str]) -> list[str]:
    """Returns the shortest list, from the first layer on, whose repetition (the last one maybe cut) gives all layers."""
    fits = (n for n in range(1, len(layers)) if all(name == layers[i % n] for i, name in enumerate(layers)))
    return list(layers[: next(fits, len(layers))])
