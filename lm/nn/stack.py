"""What every model is made of: a stack of blocks between embedded tokens and the last norm."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lm.errors import ConfigError
from lm.nn.context import Context
from lm.nn.linear import Embedding, Linear
from lm.nn.mixers.base import Attention
from lm.nn.model_config import ModelConfig
from lm.nn.ngrams import NGrams
from lm.nn.per_layer import PerLayer
from lm.nn.smear import Smear
from lm.ops.cache.cache import State
from lm.ops.recompute import NOTHING, let_compilers_in, recomputed


class Stack(nn.Module):
    """Position, blocks and last norm. Parameter names are part of the checkpoint format."""

    recompute = NOTHING

    def __init__(self, cfg: ModelConfig, n_layers: int, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.cfg, self.embed_scale = cfg, cfg.embed.scale
        self.parts = [cfg.parts(layer, cross, n_layers) for layer in range(n_layers)]
        self.position = cfg.position.build(cfg.dims(causal, n_layers))
        self.segment = Embedding(cfg.embed.segments, cfg.embed.sum_width(cfg.d_model)) if cfg.embed.segments else None
        self.embed_norm = cfg.norm.build(cfg.embed.sum_width(cfg.d_model)) if cfg.embed.norm else None
        narrow = cfg.embed.factorized
        self.widen = None if narrow is None else Linear(narrow.width, cfg.d_model, bias=narrow.bias)
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
        """Returns the input of the first block, (b, s, d).  x: token embeddings, (b, s, d), or narrower, where they are `factorized`."""
        x = self._wide(x, "tokens")
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
        x = self._wide(x, "sum")
        return self.dropout(x if self.smear is None else self.smear(x, ctx))

    def _wide(self, x: Tensor, what: str) -> Tensor:
        """Returns what of the embedding it is, widened where that is what is narrow."""
        narrow = self.cfg.embed.factorized
        return x if self.widen is None or narrow is None or narrow.widened != what else self.widen(x)

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
        ctx.collect(layer)
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
