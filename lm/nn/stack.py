"""What every model is made of: a stack of blocks between embedded tokens and the last norm."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from lm.errors import ConfigError
from lm.nn import slots as slots
from lm.nn.block import SequentialConfig
from lm.nn.block_base import BlockConfig
from lm.nn.context import Context
from lm.nn.embed import EmbedConfig
from lm.nn.ffn.base import FFNConfig
from lm.nn.ffn.none import NoFFNConfig
from lm.nn.head import HeadConfig
from lm.nn.init import InitConfig
from lm.nn.linear import Embedding
from lm.nn.mixers.base import Attention, AttentionConfig, MixerConfig, RecurrentConfig
from lm.nn.mixers.both import BothConfig
from lm.nn.mixers.none import NoMixerConfig
from lm.nn.ngrams import NGrams
from lm.nn.norm import NormConfig
from lm.nn.parametrization import Growth, ParametrizationConfig, StandardConfig
from lm.nn.parts import ATTENDING, RECURRENT, BlockParts, SlotOfLayer
from lm.nn.per_layer import PerLayer
from lm.nn.position.base import Dims, PositionConfig
from lm.nn.residual import PlainConfig, ResidualConfig
from lm.nn.smear import Smear
from lm.ops.cache.cache import State
from lm.ops.recompute import NOTHING, let_compilers_in, recomputed
from lm.schema import MOST, MOST_LAYERS, Slot, Tree, did_you_mean, from_tree


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
        if self.embed.smear is not None and self.embed.smear.channels > self.d_model:
            raise ValueError(f"embed.smear.channels={self.embed.smear.channels} is above d_model={self.d_model}. Lower it.")
        if self.embed.per_layer is not None:
            self.embed.per_layer.require(self.kind, self.block.kind, self.residual.kind, self.drafts())
        if self.drafts() and self.head.labels is not None:
            raise ValueError("mtp predicts tokens, and head.labels are none. Set mtp=null, or head.labels=null.")
        used = {self.slot(layer) for layer in range(self.n_layers)}
        if self.recurrent is None and not {*RECURRENT}.isdisjoint(self.pattern):
            raise ValueError(f"pattern={self._shown()} names recurrent layers, and recurrent is null. Choose one, as in"
                             " model/recurrent=short_conv, or drop them.")  # fmt: skip
        if self.recurrent is not None and used.isdisjoint(RECURRENT):
            raise ValueError(f"recurrent={self.recurrent.kind} mixes in no layer of {self.n_layers} with pattern={self._shown()}."
                             " Set pattern=[recurrent,attention], say, or recurrent=null.")  # fmt: skip
        self.block.require_slots(used, self._shown())
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
        slot, reader = self.slot(layer), self.attention.cross() if cross else None
        n = n_layers or self.n_layers
        ffn = self.ffn.in_layer(layer, n) if self.block.feeds(slot) else NoFFNConfig()
        sizes = self.d_model, self.dropout, self.vocab_size or 0, n
        return BlockParts(layer, self.norm, slot, self._mixer(slot, layer, n), reader, ffn, self.residual, *sizes, self.embed.per_layer)

    def _mixer(self, slot: SlotOfLayer, layer: int, n_layers: int) -> MixerConfig:
        if slot == "ffn":
            return NoMixerConfig()
        attention = self.attention.in_layer(layer, self.attending(n_layers))
        if slot == "attention":
            return attention
        assert self.recurrent is not None
        scales = {f"{name}_scale": self.block.scale_of(name) for name in ("attention", "recurrent")}
        return self.recurrent if slot == "recurrent" else BothConfig(attention=attention, recurrent=self.recurrent, **scales)

    def dims(self, causal: bool, n_layers: int | None = None) -> Dims:
        """Returns the dimensions that the position of a stack may need to know.  n_layers: of this stack; None: of the model's."""
        assert self.max_seq_len is not None
        attention, n = self.attention, n_layers or self.n_layers
        rotary, windowed = attention.rotary_width(self.d_model), attention.windowed_width(self.d_model)
        return Dims(self.d_model, attention.n_heads, rotary, self.max_seq_len, causal, attention.layer_window, n, windowed)

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


class Stack(nn.Module):
    """Position, blocks and last norm. Parameter names are part of the checkpoint format."""

    recompute = NOTHING

    def __init__(self, cfg: ModelConfig, n_layers: int, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.cfg, self.embed_scale = cfg, cfg.embed.scale
        self.parts = [cfg.parts(layer, cross, n_layers) for layer in range(n_layers)]
        self.position = cfg.position.build(cfg.dims(causal, n_layers))
        self.segment = Embedding(cfg.embed.segments, cfg.d_model) if cfg.embed.segments else None
        self.embed_norm = cfg.norm.build(cfg.d_model) if cfg.embed.norm else None
        behind = n_layers * cfg.residual.passes()
        self.smear = None if cfg.embed.smear is None else Smear(cfg.embed.smear, cfg.d_model, behind)
        behind += self.smear is not None
        self.ngrams = None if cfg.embed.ngrams is None else NGrams(cfg.embed.ngrams, cfg.d_model, behind)
        own, sizes = cfg.embed.per_layer, (cfg.d_model, cfg.vocab_size or 0, n_layers)
        self.per_layer = None if own is None else PerLayer(own, cfg.norm, *sizes)
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(cfg.block.build(parts) for parts in self.parts)
        self.residual = cfg.residual.build(cfg.d_model, n_layers)
        self.norm = nn.Identity() if cfg.norm.place == "post" else cfg.norm.build(cfg.d_model)
        self._run = recomputed
        self._attending: dict[nn.Module, list[Attention]] = {}

    def states(self) -> list[tuple[State, ...]]:
        """Returns which tensors a cache keeps of a row, layer by layer and pass by pass, and behind these what neighbours are mixed by."""
        layers = [parts.mixer.states(parts.d_model, parts.layer) for parts in self.parts] * self.cfg.residual.passes()
        return [*layers, *((part.state(),) for part in (self.smear, self.ngrams) if part is not None)]

    def embedded(self, x: Tensor, ctx: Context, segments: Tensor | None) -> Tensor:
        """Returns the input of the first block, (b, s, d).  x: token embeddings, (b, s, d)."""
        x = x if self.ngrams is None else self.ngrams(x, ctx)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        if self.training and (noise := self.cfg.embed.noise):
            x = x + torch.empty_like(x).uniform_(-1, 1) * (noise / x[0].numel() ** 0.5)
        if self.segment is not None:
            first = torch.zeros(1, dtype=torch.long, device=x.device)  # through the module, by which ZeRO-3 knows that its weight is read
            x = x + self.segment(first if segments is None else segments)
        elif segments is not None:
            raise ConfigError("batch.segments was given, and model.embed.segments is null. Leave them out, or use a model that has some.")
        x = self.position.embed(x, ctx.positions)
        x = x if self.embed_norm is None else self.embed_norm(x)
        return self.dropout(x if self.smear is None else self.smear(x, ctx))

    def through_blocks(self, x: Tensor, ctx: Context) -> Tensor:
        """(b, s, d) -> (b, s, d), before the last norm."""
        n = len(self.blocks)
        passes = [ctx, *(ctx.again(n * i) for i in range(1, self.cfg.residual.passes()))]
        own = [None] * n if self.per_layer is None else self.per_layer(x, ctx)
        layers = [(block, i, each.for_layer(own[i])) for each in passes for i, block in enumerate(self.blocks)]
        out: Tensor = self.residual(x, [partial(self.through, *layer) for layer in layers])
        return out

    def through(self, block: nn.Module, layer: int, ctx: Context, *inputs: Tensor) -> Tensor:
        """Returns block(*inputs, ctx); in training, what `recompute` says is recomputed in the backward."""
        if self._run is not recomputed and ctx.cache is None:
            self._prepare(block, ctx, len(inputs[0]))
        out = self._run(block, self.recompute.of(layer) if self.training else "none", *inputs, ctx)
        ctx.collect_moe(layer)
        return out

    def _prepare(self, block: nn.Module, ctx: Context, rows: int) -> None:
        """Has masks built before a compiler sees the block."""
        if block not in self._attending:
            self._attending[block] = [each for each in block.modules() if isinstance(each, Attention)]
        for attention in self._attending[block]:
            attention.prepare(ctx, rows)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the blocks, in place: blocks that are alike share what is compiled, however many they are. Hooks of some blocks alone
        are called where torch._dynamo.config.skip_nnmodule_hook_guards was false before; else what is shared has those of one of them."""
        let_compilers_in()
        self._run = torch.compile(recomputed, *args, **kwargs)

    def sublayers(self, name: str) -> int:
        """Returns how many sublayers add to the residual stream that the parameter of this name writes to."""
        return (self.parts[0].sublayers + (self.per_layer is not None)) * len(self.blocks) * self.cfg.residual.passes()
