"""The models: decoder-only, encoder-only, encoder-decoder."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from lm.errors import ConfigError, ResourceError, expect
from lm.nn.batch import AskedAs, Batch
from lm.nn.block import SequentialConfig
from lm.nn.context import Context, Reported
from lm.nn.device_memory import require_memory
from lm.nn.embed import TABLES
from lm.nn.ffn.base import Mixture
from lm.nn.head import Head, Reader, TokenEmbedding, pooled
from lm.nn.init import Declares, init_weights, role_of
from lm.nn.model_config import ModelConfig
from lm.nn.mtp import MTPBlock, MTPConfig, shifted
from lm.nn.parametrization import Role
from lm.nn.stack import Stack
from lm.ops.attention.mask import Mask
from lm.ops.cache.cache import Cache
from lm.ops.recompute import Recompute
from lm.schema import MOST_LAYERS, Tree


class DecoderConfig(ModelConfig):
    """A decoder-only Transformer, assembled from slots."""

    kind: Literal["decoder"] = "decoder"
    mtp: MTPConfig | None = None
    """Multi-token prediction (DeepSeek-V3). null: off."""

    def drafts(self) -> bool:
        return self.mtp is not None

    def why_not_context_parallel(self, n: int) -> str | None:
        said = "model.mtp reads the next tokens, maybe another rank's. Set model.mtp=null"
        return said if self.mtp is not None else super().why_not_context_parallel(n)

    def build(self) -> "DecoderLM":
        return DecoderLM(self)


class EncoderConfig(ModelConfig):
    """A bidirectional Transformer that fills in masked tokens (Devlin et al. 2018, arXiv:1810.04805)."""

    kind: Literal["encoder"] = "encoder"

    @model_validator(mode="after")
    def _reads_both_ways(self) -> Self:
        if self.recurrent is not None:
            raise ValueError(f"recurrent={self.recurrent.kind} reads from left to right, and an encoder in both directions."
                             " Set recurrent=null and pattern=[attention].")  # fmt: skip
        return self

    def build(self) -> "EncoderLM":
        return EncoderLM(self)


class EncoderDecoderConfig(ModelConfig):
    """A bidirectional encoder, and a decoder that reads its output (Vaswani et al. 2017, arXiv:1706.03762)."""

    kind: Literal["encoder_decoder"] = "encoder_decoder"
    reads_source = True
    n_encoder_layers: int | None = Field(None, gt=0, le=MOST_LAYERS)
    """Blocks of the encoder. null: n_layers."""
    start_token: int | None = Field(None, ge=0)
    """The decoder's first input (BART: eos; T5: pad). null: the tokenizer's bos, or else pad."""
    first_token: int | None = Field(None, ge=0)
    """The token that every target begins with, and every answer: a language (M2M-100, NLLB), bos (BART). null: none is given."""

    @model_validator(mode="after")
    def _both_stacks_fit(self) -> Self:
        self.residual.require(self.norm, self.block.kind, self.drafts(), self.n_encoder_layers or self.n_layers)
        if said := self.block.why_not_cross():
            raise ValueError(f"{said} in an encoder-decoder.")
        self.attention.require_both_stacks(self.n_encoder_layers or self.n_layers)
        tokens = {"start_token": self.start_token, "first_token": self.first_token}
        if self.vocab_size is not None and (beyond := [f"{key}={i}" for key, i in tokens.items() if (i or 0) >= self.vocab_size]):
            raise ValueError(f"{beyond[0]} is not below vocab_size={self.vocab_size}. Choose a token of the vocabulary.")
        return self

    def build(self) -> "EncoderDecoderLM":
        return EncoderDecoderLM(self)

    def why_not_context_parallel(self, n: int) -> str | None:
        return "model.kind=encoder_decoder reads a source beside its row, and only one row is cut. Use a decoder"

    def encoder(self) -> Self:
        """Returns the config of the encoder's stack: this one with attention in every layer."""
        block = self.block.replace(recurrent_place=None) if isinstance(self.block, SequentialConfig) else self.block
        return self if self.recurrent is None else self.replace(recurrent=None, pattern=["attention"], block=block)

    def implied(self) -> Tree:
        return super().implied() | {"n_encoder_layers": self.n_encoder_layers or self.n_layers}


class LM(Stack):
    """A stack with the embedding below it and the head above. Parameter names are part of the checkpoint format."""

    def __init__(self, cfg: ModelConfig, causal: bool, cross: bool = False) -> None:
        """cfg: with vocab_size and max_seq_len set."""
        if cfg.vocab_size is None or cfg.max_seq_len is None:
            raise ConfigError("model: vocab_size and max_seq_len are not set. Write cfg.replace(vocab_size=4096, max_seq_len=256), say.")
        super().__init__(cfg, cfg.n_layers, causal, cross)
        self.causal, self.vocab_size, self.max_seq_len = causal, cfg.vocab_size, cfg.max_seq_len
        self.embed = TokenEmbedding(self.vocab_size, cfg.embed.token_width(cfg.d_model))
        self.head = Head(cfg.head, cfg.norm, cfg.d_model, self.vocab_size, cfg.narrowed())
        self.mtp, self.runs_mtp = nn.ModuleList(), True  # blocks that predict further tokens, in drafts and, where this is set, in training
        self.cache_form: str | None = None  # how a cache stores a token: bf16, int8; None: in the model's dtype
        self.asked_as: AskedAs = "text"  # how decoding puts a prompt to it
        self.fast_path: Callable[[Tensor, Context], Tensor | None] | None = None  # runs blocks and last norm faster, or gives None
        self.tie()

    def tie(self) -> None:
        """Ties the head's matrix to the embedding where the config says so; moving off the meta device separates them."""
        if self.cfg.head.tied:
            self.head.weight = self.embed.weight

    def forward(self, batch: Batch | Tensor, read: Reader | None = None, cache: Cache | None = None) -> Any:
        """Returns logits (b, s, v), or the result of `read(hidden, head, context)`: a loss in chunks, or the last position's logits, say.
        With a cache, tokens continue the cached ones, one document a row; positions default to the next ones. A bare tensor holds tokens.
        """
        x, ctx = self.hidden(Batch.of(batch), cache)
        return self.head(x) if read is None else read(x, self.head, ctx)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As Stack.compile, the blocks of all stacks. Head and loss, whose gradient is written by hand, are not compiled with them."""
        for stack in self.stacks():
            Stack.compile(stack, *args, **kwargs)

    def hidden(self, batch: Batch, cache: Cache | None) -> tuple[Tensor, Context]:
        """Returns the hidden states after the last norm, which the head reads, (b, s, d), and the context of this forward."""
        batch.require(None if cache is None else cache.length)
        ctx = self.context(batch, cache)
        if cache is not None:
            cache.begin(ctx.mask.q_positions)
        x = self.embedded(self.embed(batch.tokens, batch.sharding), ctx, batch.segments)  # (b, s) -> (b, s, d)
        fast = self.fast_path(x, ctx) if self.fast_path is not None else None
        x = self.norm(self.through_blocks(x, ctx)) if fast is None else fast
        self.predict_further(x, batch, ctx)
        return pooled(x, ctx.mask) if self.cfg.head.pooling == "mean" else x, ctx

    def context(self, batch: Batch, cache: Cache | None) -> Context:
        """Returns the context that all blocks share in this forward."""
        if batch.source_tokens is not None and len(self.stacks()) == 1:
            raise ConfigError(f"batch.source_tokens was given, and a model of kind {self.cfg.kind} reads no source. Leave them out.")
        positions = batch.positions if batch.positions is not None else self._next_positions(batch, cache)
        square = batch.positions is None and batch.documents is None and cache is None
        rows = positions, positions, batch.documents, batch.documents
        mask = Mask(*rows, self.causal, square, batch.prefix, padded=batch.padded, sharding=batch.sharding)
        angles = self.position.angles(batch.sharding.for_sublayer(positions))
        return Context(self.position, mask, angles, cache, tokens=batch.tokens)

    def _next_positions(self, batch: Batch, cache: Cache | None) -> Tensor:
        places = self.position.places(batch.row_len, batch.tokens.device, 0 if cache is None else cache.length)
        return places if cache is None else places.expand_as(batch.tokens)

    def predict_further(self, hidden: Tensor, batch: Batch, ctx: Context) -> None:
        """Models with multi-token prediction add the hidden states that predict further tokens to `ctx.mtp`."""

    def stacks(self) -> list[Stack]:
        """Returns all stacks of blocks, the encoder's first."""
        return [self]

    def units(self) -> list[nn.Module]:
        """Returns all blocks, the encoder's first: each is sharded, and recomputed, as one unit."""
        return [*(block for stack in self.stacks() for block in stack.blocks), *self.mtp]

    def recomputes(self, how: Recompute) -> None:
        """Sets what the blocks recompute in the backward (activation checkpointing)."""
        for stack in self.stacks():
            stack.recompute = how

    def new_cache(self, batch: int, max_len: int, slack: int = 8, horizon: int | None = None) -> Cache:
        """Returns an empty cache for `batch` rows of up to max_len tokens.  slack, horizon: as in `Cache`."""
        return Cache(self.states(), batch, max_len, self.embed.weight, slack, horizon, form=self.cache_form)

    def matrices(self) -> set[str]:
        """Names of the blocks' weights that Muon treats as matrices: 2-D, or stacks of them, (e, out, in)."""
        inside, roles = {id(p) for unit in self.units() for p in unit.parameters()}, self.roles()
        return {name for name, p in self.named_parameters() if id(p) in inside and roles[name] in ("hidden", "scores")}

    def tables(self) -> set[str]:
        """Names of the weights whose rows are looked up: the embedding, the tables of its n-grams, and those that layers read."""
        return {name for name, _ in self.named_parameters() if name.endswith(TABLES)}

    def roles(self) -> dict[str, Role | None]:
        """Returns the `Role` of each weight by name; None for a matrix whose initializer is not of lm.nn.init."""
        return {f"{prefix}.{name}": role_of(module, name, p) for prefix, module, name, p in self._each()}

    def self_updated(self) -> dict[str, nn.Parameter]:
        """Returns by name the parameters that the model itself updates, in `balance`: no gradient, no optimizer, always float32."""
        return {f"{at}.{name}": p for at, module, name, p in self._each() if isinstance(module, Declares) and name in module.self_updated}

    def _each(self) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
        """Yields of every parameter the name of its module, the module, and the parameter's name within the module."""
        for prefix, module in self.named_modules():
            yield from ((prefix, module, name, p) for name, p in module.named_parameters(recurse=False))

    def balance(self, loads: Tensor) -> None:
        """Updates the `self_updated` ones of MoE layers.  loads: (MoE layers, e), tokens per expert of one whole optimizer step."""
        for layer, load in zip(self.mixtures().values(), loads, strict=True):
            layer.balance(load)

    def mixtures(self) -> dict[str, Mixture]:
        """The MoE layers that training runs, by their blocks' names, in the order in which they report loads: the encoder's first."""
        names = {module: name.removesuffix(".ffn") for name, module in self.named_modules()}
        found = (module for unit in self.units() if self.runs_mtp or unit not in {*self.mtp} for module in unit.modules())
        return {names[module]: module for module in found if isinstance(module, Mixture)}


class DecoderLM(LM):
    """Token ids to logits of the next token."""

    cfg: DecoderConfig

    def __init__(self, cfg: DecoderConfig) -> None:
        super().__init__(cfg, causal=True)
        self.mtp.extend(MTPBlock(cfg.block, cfg.parts(cfg.n_layers + k)) for k in range(cfg.mtp.depth if cfg.mtp is not None else 0))

    def predict_further(self, hidden: Tensor, batch: Batch, ctx: Context) -> None:
        ctx.mtp_weight = self.cfg.mtp.weight if self.cfg.mtp is not None else 0.0
        for n, block in enumerate(self.mtp if self.training and self.runs_mtp else (), 1):
            later = self.embed(shifted(batch.tokens, n, 0)) * self.embed_scale
            hidden = self.through(block, len(self.blocks) + n - 1, ctx, hidden, later)
            ctx.mtp.append(hidden)


class EncoderLM(LM):
    """Token ids, some of them masked, to logits of the token at each place."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__(cfg, causal=False)

    def new_cache(self, batch: int, max_len: int, slack: int = 8, horizon: int | None = None) -> Cache:
        raise ConfigError("an encoder sees all of its input at once and continues nothing. Generate with a decoder or an encoder-decoder.")


class EncoderDecoderLM(LM):
    """Source tokens (encoder) and decoder tokens to logits of the next one. Names of the decoder's parameters have no prefix."""

    def __init__(self, cfg: EncoderDecoderConfig) -> None:
        super().__init__(cfg, causal=True, cross=True)
        self.encoder = Stack(cfg.encoder(), cfg.n_encoder_layers or cfg.n_layers, causal=False)

    def context(self, batch: Batch, cache: Cache | None) -> Context:
        """Returns the context with the encoded source in `memory`, or without, where the cache holds the source already."""
        ctx = super().context(batch, cache)
        if batch.source_tokens is not None:
            ctx.memory, source = self._encode(batch, ctx.reported)
            if cache is not None:
                cache.remember(source)
        elif cache is not None and cache.memory_positions is not None:
            source = cache.memory_positions
        else:
            raise ConfigError("cross-attention needs a source, and batch.source_tokens is None. Give the source tokens.")
        q, square = ctx.mask.q_positions, all(each is None for each in (batch.positions, batch.source_positions, batch.documents, cache))
        ctx.memory_mask = Mask(q, source, batch.documents, batch.source_documents, causal=False, square=square, sharding=batch.sharding)
        return ctx

    def _encode(self, batch: Batch, reported: Reported) -> tuple[Tensor, Tensor]:
        """Returns the hidden states of the source, (b, m, d), and its positions, (b, m)."""
        assert batch.source_tokens is not None
        tokens, documents, positions = batch.source_tokens, batch.source_documents, batch.source_positions
        encoder, square = self.encoder, positions is None and documents is None
        positions = encoder.position.places(tokens.shape[1], tokens.device) if positions is None else positions
        mask = Mask(positions, positions, documents, documents, causal=False, square=square, sharding=batch.sharding)
        ctx = Context(encoder.position, mask, encoder.position.angles(positions), stack="encoder", reported=reported, tokens=tokens)
        x = encoder.through_blocks(encoder.embedded(self.embed(tokens), ctx, None), ctx)  # (b, m) -> (b, m, d)
        return encoder.norm(x), positions.expand(len(tokens), -1)

    def stacks(self) -> list[Stack]:
        return [self.encoder, self]

    def sublayers(self, name: str) -> int:
        return self.encoder.sublayers(name) if name.startswith("encoder.") else super().sublayers(name)


def build_model(cfg: ModelConfig, seed: int | None = None, device: torch.device | str = "cpu") -> LM:
    """The model of this config, its weights drawn from `seed`, or empty (None). Raises ResourceError where the device cannot hold them."""
    expect("cfg", cfg, ModelConfig, "Give that of a model, such as lm.config('nano').model")
    try:
        with torch.device("meta"):
            model = cfg.written_out().build()
    except RuntimeError as error:  # sizes whose product overflows
        raise ResourceError(f"model: it is too large to be counted ({str(error).splitlines()[0]}). Lower its sizes.") from None
    assert isinstance(model, LM)
    model.cfg = cfg
    if str(device) == "meta":
        return model
    require_memory(sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())), device, "the weights")
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))  # to_empty imports sympy, which takes a while
    model.tie()
    if seed is not None:
        init_weights(model, cfg.init, cfg.growth(), model.sublayers, seed)
    return model
