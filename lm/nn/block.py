"""One layer: a mixer and a feed-forward, one after the other or side by side, or one of them alone; in decoders with a source,
cross-attention between."""

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor, nn

from lm.nn.activation_memory import Activations, sum_activations
from lm.nn.block_base import BranchConfig, InTurnConfig
from lm.nn.context import Context
from lm.nn.ffn.base import FFNConfig
from lm.nn.norm import NormConfig, PreNorm
from lm.nn.parts import BlockParts, SlotOfLayer
from lm.nn.per_layer import PerLayerRead


class SequentialConfig(InTurnConfig):
    """Mixer, then feed-forward, each with its own residual."""

    kind: Literal["sequential"] = "sequential"
    first_norm: bool = True
    """The first layer's mixer has a norm; false where that of the embedding stands for it (ModernBERT)."""
    stream_gain: bool = False
    """What a layer gives, the residual stream with it, is multiplied by a number that it learns, 1 at first (Gemma 4)."""

    def build(self, parts: BlockParts) -> nn.Module:
        if parts.cross is not None:
            return CrossBlock(self, parts)
        if parts.per_layer is not None:
            return (GainedPerLayerBlock if self.stream_gain else PerLayerBlock)(self, parts)
        return (GainedBlock if self.stream_gain else Block)(self, parts)

    def why_not_cross(self) -> str | None:
        return "block.stream_gain=true has no form in layers with cross-attention. Set it to false" if self.stream_gain else None

    def saved_activations(self, parts: BlockParts) -> Activations:
        missing = 0 if self.first_norm or parts.layer else parts.d_model
        gained = parts.d_model if self.stream_gain else 0
        return sum_activations([super().saved_activations(parts), Activations(gained - missing, 0)])

    def require_slots(self, used: Collection[SlotOfLayer], pattern: str) -> None:
        super().require_slots(used, pattern)
        self.require_scales(used, pattern)

    def first(self, alone: PreNorm, parts: BlockParts, nth: int) -> PreNorm:
        if parts.layer == nth == 0 and not self.first_norm:
            alone.norm = nn.Identity()
        return alone

    def require(self, norm: NormConfig, ffn: FFNConfig, recurrent: bool) -> None:
        super().require(norm, ffn, recurrent)
        places = {"norm.place": norm.place, "recurrent_place": self.recurrent_place or "pre"}
        wrong = [f"{name}={place}" for name, place in places.items() if place != "pre"]
        if not self.first_norm and wrong:
            raise ValueError(f"first_norm=false leaves out a norm before a mixer, and {wrong[0]}. Use place=pre, or drop it.")


class SingleBlockConfig(InTurnConfig):
    """A mixer or a feed-forward, whichever `pattern` names (Nemotron-H, arXiv:2504.03624, section 2.1)."""

    kind: Literal["single"] = "single"

    def build(self, parts: BlockParts) -> nn.Module:
        return Single(self, parts)

    def feeds(self, slot: SlotOfLayer) -> bool:
        return slot == "ffn"

    def require(self, norm: NormConfig, ffn: FFNConfig, recurrent: bool) -> None:
        super().require(norm, ffn, recurrent)
        if not ffn.sublayers:
            raise ValueError(f"block=single has layers of feed-forwards, and ffn={ffn.kind} is none. Use block=sequential.")

    def require_slots(self, used: Collection[SlotOfLayer], pattern: str) -> None:
        if "ffn" not in used:
            raise ValueError(f"block=single has its feed-forwards in layers of their own, and pattern={pattern} names none. Name ffn in it,"
                             " as in [attention,ffn], or use block=sequential.")  # fmt: skip
        if len(used) == 1:
            raise ValueError(f"pattern={pattern} leaves no layer in which tokens read each other. Name attention or recurrent in it.")
        self.require_scales(used, pattern)


class ParallelConfig(BranchConfig):
    """Mixer and feed-forward side by side on one residual (GPT-J, PaLM: one norm; GPT-NeoX: two)."""

    kind: Literal["parallel"] = "parallel"
    shared_norm: bool = True
    """Both read the same normalised input; false gives each a norm of its own (GPT-NeoX)."""

    def build(self, parts: BlockParts) -> nn.Module:
        return ParallelBlock(self, parts)

    def saved_activations(self, parts: BlockParts) -> Activations:
        d = parts.d_model
        narrow = (1 if self.shared_norm else 2) + (0 if self.layer_scale is None else 1)
        return Activations(d, narrow * d, d if parts.dropout else 0, d if self.shared_norm else 0)

    def require(self, norm: NormConfig, ffn: FFNConfig, recurrent: bool) -> None:
        if norm.place != "pre":
            raise ValueError(f"norm.place={norm.place} has no meaning in block=parallel. Use place=pre, or block=sequential.")
        if ffn.norms_itself:
            raise ValueError(
                f"ffn={ffn.kind} reads the residual stream itself, and in block=parallel what a norm gives. Use block=sequential."
            )
        if not ffn.sublayers:
            raise ValueError(f"block=parallel has a feed-forward beside each mixer, and ffn={ffn.kind} is none. Use block=sequential.")


class Layer(nn.Module):
    """A mixer, or a feed-forward alone; it has the name of its slot."""

    def __init__(self, parts: BlockParts) -> None:
        super().__init__()
        self.slot, d, layer = parts.slot, parts.d_model, parts.layer
        mixer = None if self.slot == "ffn" else parts.mixer.build_in(parts.vocab_size, parts.norm, d, layer)
        self.add_module(self.slot, parts.ffn.build(d, layer) if mixer is None else mixer)

    def slot_module(self, ending: str = "") -> nn.Module:
        """Returns the mixer, or what has its name with this ending."""
        found = self._modules[f"{self.slot}{ending}"]  # get_submodule takes a name apart each time
        assert found is not None
        return found


class Single(Layer):
    """x = residual(x, sublayer)."""

    def __init__(self, cfg: InTurnConfig, parts: BlockParts) -> None:
        super().__init__(parts)
        self.add_module(f"{self.slot}_residual", cfg.residual(parts, 0))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        sublayer = self.slot_module()
        out: Tensor = self.slot_module("_residual")(x, lambda h: sublayer(h, ctx))
        return out


class Block(Single):
    """x = residual(x, mixer); x = residual(x, ffn)."""

    def __init__(self, cfg: SequentialConfig, parts: BlockParts) -> None:
        super().__init__(cfg, parts)
        self.ffn = parts.ffn.build(parts.d_model, parts.layer)
        self.ffn_residual = parts.ffn.connected(cfg.residual(parts, len(parts.mixers)))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = super().forward(x, ctx)
        return self.ffn_residual(x, lambda h: self.ffn(h, ctx))


class PerLayerBlock(Block):
    """x = residual(x, mixer); x = residual(x, ffn); x = read(x, own)."""

    def __init__(self, cfg: SequentialConfig, parts: BlockParts) -> None:
        super().__init__(cfg, parts)
        assert parts.per_layer is not None
        self.read = PerLayerRead(parts.per_layer, parts.norm, parts.d_model, cfg.branch(parts, cfg.residual_scale))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        out: Tensor = self.read(super().forward(x, ctx), ctx)
        return out


class GainedBlock(Block):
    """gain * block(x).  Gemma 4, Google 2026."""

    def __init__(self, cfg: SequentialConfig, parts: BlockParts) -> None:
        super().__init__(cfg, parts)
        self.gain = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return super().forward(x, ctx) * self.gain


class GainedPerLayerBlock(GainedBlock, PerLayerBlock):
    """gain * read(block(x), own)."""


class CrossBlock(Block):
    """A block that reads a source between mixer and feed-forward.  Vaswani et al. 2017, arXiv:1706.03762, section 3.1."""

    def __init__(self, cfg: SequentialConfig, parts: BlockParts) -> None:
        super().__init__(cfg, parts)
        assert parts.cross is not None
        self.cross = parts.cross.build_cross(parts.norm, parts.d_model, parts.layer)
        self.cross_residual = cfg.residual(parts, 1)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = Single.forward(self, x, ctx)
        x = self.cross_residual(x, lambda h: self.cross(h, ctx))
        return self.ffn_residual(x, lambda h: self.ffn(h, ctx))


class ParallelBlock(Layer):
    """x + mixer(norm(x)) + ffn(norm(x)).  Wang & Komatsuzaki 2021 (GPT-J); Chowdhery et al. 2022, arXiv:2204.02311, section 2."""

    def __init__(self, cfg: ParallelConfig, parts: BlockParts) -> None:
        super().__init__(parts)
        self.ffn = parts.ffn.build(parts.d_model, parts.layer)
        self.add_module(f"{self.slot}_norm", parts.norm.build(parts.d_model))
        self.ffn_norm = None if cfg.shared_norm else parts.norm.build(parts.d_model)
        self.branch = cfg.branch(parts)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        h = self.slot_module("_norm")(x)
        g = h if self.ffn_norm is None else self.ffn_norm(x)
        return x + self.branch(self.slot_module()(h, ctx) + self.ffn(g, ctx))
