"""Activation checkpointing: what a block computes again for the backward instead of keeping it.  Chen et al. 2016, arXiv:1604.06174."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lm.ops.linear import ONEDNN

Recomputed = Literal["none", "block", "selective"]

PRODUCTS = {"aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm", "lm::matmul_by_expert"} | ONEDNN
"""Of tokens with weights. Those of tokens with tokens, aten::bmm, may give a number for each pair."""
KERNELS = {f"aten::_scaled_dot_product_{kind}" for kind in (
    "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention", "fused_attention_overrideable"
)}  # fmt: skip
_KEPT = PRODUCTS | KERNELS | {"flex_attention", "aten::topk"}  # of equal scores a second call might choose other experts


@dataclass(frozen=True)
class Recompute:
    """block: all but the block's input is computed again; selective: all but that, matrix products and fused attention."""

    what: Recomputed = "none"
    every: int = 1  # of every n-th block, the first one included

    def of(self, layer: int) -> Recomputed:
        """Returns what layer `layer` computes again."""
        return self.what if layer % self.every == 0 else "none"


NOTHING = Recompute()


def recomputed(block: nn.Module, what: Recomputed, *inputs: Any) -> Tensor:
    """What block(*inputs) gives, with the same gradients to the bit, dropout included.

    selective raises RuntimeError where something is written over a result that is kept: the backward would do so a second time. torch 2.11
    tells no results, so that there only torch's own check is left, which does not see it through another shape.
    """
    if what == "none":
        out: Tensor = block(*inputs)
    elif what == "block":
        out = checkpoint(block, *inputs, use_reentrant=False)
    else:
        out = checkpoint(block, *inputs, use_reentrant=False, context_fn=_selective)
    return out


def let_compilers_in() -> None:
    """Lets them follow blocks that are run again: what these write into the context is there already, and need not be written again."""
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def _selective() -> Any:
    return create_selective_checkpoint_contexts(Policy())


class Policy:
    """Which results of one forward of a block are kept."""

    def __init__(self) -> None:
        self._kept: set[int] = set()  # their storages

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """op: an operation of torch.ops that was called with these arguments. torch up to 2.12 asks again in the backward, when another
        tensor may lie where a kept one lay."""
        if op.name() in _KEPT and not _draws(op, args):
            self._kept |= _storages(getattr(ctx, "op_output", ()))
            return CheckpointPolicy.MUST_SAVE
        in_place = op.name().partition(".")[0].endswith("_") and not ctx.is_recompute
        if in_place and self._kept & _storages(args[:1]):
            raise RuntimeError(f"{op.name()} changes the result of a matrix product in place, which recompute=selective keeps")
        return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether a kernel drops weights: not run again, it would leave the generator behind for what is drawn after it."""
    if op.name() not in KERNELS:
        return False
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False))
    return bool(given.get("dropout_p"))


def _storages(values: Any) -> set[int]:
    return {x.untyped_storage()._cdata for x in tree_leaves(values) if isinstance(x, torch.Tensor)}
