"""What kinds of blocks are configured by: the slot, and what kinds share."""

from abc import abstractmethod
from collections.abc import Collection
from typing import Self

from pydantic import Field, model_validator
from torch import nn

from lm.nn.activation_memory import Activations, sum_activations
from lm.nn.ffn.base import FFNConfig
from lm.nn.norm import Branch, LayerScale, NormConfig, Place, PreNorm, build_residual
from lm.nn.parts import ATTENDING, RECURRENT, BlockParts, SlotOfLayer
from lm.schema import Slot


class BlockConfig(Slot, group="model/block"):
    """How the sublayers of a layer stand to each other."""

    @abstractmethod
    def build(self, parts: BlockParts) -> nn.Module:
        """Returns a module that is called with (b, s, d) and the Context."""

    @abstractmethod
    def saved_activations(self, parts: BlockParts) -> Activations:
        """Returns what autograd saves of one token around the sublayers: norms, inputs, and masks of dropout."""

    def require(self, norm: NormConfig, ffn: FFNConfig, recurrent: bool) -> None:
        """Raises ValueError where this norm, its place, or this feed-forward does not fit. recurrent: some layer is recurrent."""

    def require_slots(self, used: Collection[SlotOfLayer], pattern: str) -> None:
        """Raises ValueError where these slots are not what layers may be called by.  used: those of all layers; pattern: as it is shown."""
        if "ffn" in used:
            raise ValueError(f"pattern={pattern} names layers of a feed-forward alone, which are of block=single. Use it, or drop them.")

    def why_not_cross(self) -> str | None:
        """Returns why there is no place for cross-attention, with the remedy; None where there is."""
        return f"block={self.kind} has no place for cross-attention. Use block=sequential"

    def feeds(self, slot: SlotOfLayer) -> bool:
        """Returns whether layers that are called so have a feed-forward."""
        return True

    def scale_of(self, slot: SlotOfLayer) -> float:
        """Returns the factor on what this slot adds, beside that on all of them."""
        return 1.0

    def why_not_context_parallel(self) -> str | None:
        """Returns why ranks cannot hold a row in slices, with the remedy; None where they can."""
        return None


class BranchConfig(BlockConfig):
    """What kinds have in common that change what sublayers add to the residual stream."""

    layer_scale: float | None = Field(None, gt=0)
    """What a learned vector begins with that multiplies what each sublayer adds, side by side their sum (CaiT: 0.1, and 1e-5 in deep
    models; arXiv:2103.17239). null: there is none."""
    layer_dropout: float = Field(0.0, ge=0, lt=1)
    """Probability that in training a sublayer of the last layer adds nothing to a row (stochastic depth, arXiv:1603.09382)."""
    layer_dropout_grows: bool = True
    """It grows with the depth, from 1/n of that in the first of n layers; false: it is that of all layers (LayerDrop, arXiv:1909.11556)."""

    @model_validator(mode="after")
    def _something_grows(self) -> Self:
        if not self.layer_dropout and not self.layer_dropout_grows:
            raise ValueError("layer_dropout_grows=false has no effect without layer_dropout. Set that, or drop it.")
        return self

    def branch(self, parts: BlockParts, scale: float = 1.0) -> Branch:
        """Returns what scales and drops out a sublayer's output before it is added to the residual stream."""
        depth = min(1.0, (parts.layer + 1) / parts.n_layers) if self.layer_dropout_grows else 1.0  # blocks of mtp are beyond the last layer
        given = parts.dropout, scale, self.layer_dropout * depth
        return Branch(*given) if self.layer_scale is None else LayerScale(*given, parts.d_model, self.layer_scale)

    def why_not_context_parallel(self) -> str | None:
        if not self.layer_dropout:
            return None
        return "model.block.layer_dropout is drawn for a row, of which a rank has a slice. Set model.block.layer_dropout=0"


class InTurnConfig(BranchConfig):
    """What kinds share whose sublayers each have their own residual."""

    residual_scale: float = Field(1.0, gt=0)
    """Factor on what each sublayer adds to the residual stream (Granite)."""
    attention_scale: float = Field(1.0, gt=0)
    """Factor on what attention adds, beside residual_scale (Falcon-H1)."""
    recurrent_scale: float = Field(1.0, gt=0)
    """Factor on what recurrent mixers add, beside residual_scale (Falcon-H1)."""
    ffn_scale: float = Field(1.0, gt=0)
    """Factor on what feed-forwards add, beside residual_scale (Falcon-H1)."""
    recurrent_place: Place | None = None
    """Where norms stand in layers that `pattern` calls recurrent (OLMo Hybrid: pre, beside output in the others). null: norm.place."""

    def saved_activations(self, parts: BlockParts) -> Activations:
        norms = 2 if self.norm(parts).place == "sandwich" else 1
        width = parts.sublayers * parts.d_model
        scaled = 0 if self.layer_scale is None else width
        between = width - parts.d_model  # the stream between sublayers: a compiler adds it up again from what they give
        masks = width if parts.dropout else 0
        alone = Activations(norms * width, width + scaled, masks, recomputed_wide=between, recomputed=-between)
        return sum_activations([alone, parts.residual.saved_activations(parts.d_model, parts.sublayers)])

    def norm(self, parts: BlockParts) -> NormConfig:
        """Returns the norm of the sublayers, with its place in this layer."""
        place = self.recurrent_place if parts.slot == "recurrent" else None
        return parts.norm if place is None else parts.norm.replace(place=place)

    def residual(self, parts: BlockParts, nth: int) -> nn.Module:
        """Returns the residual connection of the nth sublayer of this block."""
        scale = self.residual_scale * self.scale_of(parts.sublayer(nth))
        alone = build_residual(self.norm(parts), parts.d_model, self.branch(parts, scale))
        if parts.sublayer(nth) == "ffn" and parts.ffn.norms_itself:
            alone.norm = nn.Identity()
        return parts.residual.connect(self.first(alone, parts, nth), parts.d_model, parts.layer * parts.sublayers + nth)

    def scale_of(self, slot: SlotOfLayer) -> float:
        return {"attention": self.attention_scale, "recurrent": self.recurrent_scale, "ffn": self.ffn_scale}.get(slot, 1.0)

    def require_scales(self, used: Collection[SlotOfLayer], pattern: str) -> None:
        """Raises ValueError for the factor of a slot that no layer has.  used, pattern: as in require_slots."""
        for name, scale, layers in (("attention", self.attention_scale, ATTENDING), ("recurrent", self.recurrent_scale, RECURRENT)):
            if scale != 1.0 and {*layers}.isdisjoint(used):
                raise ValueError(f"{name}_scale={scale} has no layer, as pattern={pattern} names none of {name}. Leave it out.")

    def first(self, alone: PreNorm, parts: BlockParts, nth: int) -> PreNorm:
        """Returns the residual connection of a single stream, as the nth sublayer of this layer has it."""
        return alone

    def require(self, norm: NormConfig, ffn: FFNConfig, recurrent: bool) -> None:
        places = {"norm.place": norm.place, "recurrent_place": (self.recurrent_place if self.feeds("recurrent") else None) or "pre"}
        behind = [f"{name}={place}" for name, place in places.items() if place not in ("pre", "sandwich")]
        if ffn.norms_itself and behind:
            raise ValueError(f"ffn={ffn.kind} has norms before its parts, and {behind[0]} none. Use place=pre or sandwich.")
        if self.recurrent_place is not None and not recurrent:
            raise ValueError(f"recurrent_place={self.recurrent_place} is of recurrent layers, and there are none. Use norm.place.")
        if self.ffn_scale != 1.0 and not ffn.sublayers:
            raise ValueError(f"ffn_scale={self.ffn_scale} is of feed-forwards, and ffn={ffn.kind} is none. Leave it out.")
