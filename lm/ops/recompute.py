"""Activation checkpointing: what a block recomputes in the backward instead of keeping it.  Chen et al. 2016, arXiv:1604.06174."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lm.ops.compiling import expect_kinds
from lm.ops.linear import ONEDNN

T = TypeVar("T")
Recomputed = Literal["none", "block", "selective"]

PRODUCTS = {"aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm", "lm::matmul_by_expert"} | ONEDNN
"""Of tokens with weights. Those of tokens with tokens, aten::bmm, may give a number for each pair."""
KERNELS = {f"aten::_scaled_dot_product_{kind}" for kind in (
    "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention", "fused_attention_overrideable"
)}  # fmt: skip
_KEPT = PRODUCTS | KERNELS | {"aten::topk"}  # topk: of equal scores a second call might choose other experts
# Not flex_attention, which only a compiler shows: whether it can be kept since its masks are built before the blocks has not been tried.


@dataclass(frozen=True)
class Recompute:
    """block: all but the block's input is recomputed; selective: all but its input, matrix products and fused attention."""

    what: Recomputed = "none"
    every: int = 1  # of every n-th block, the first one included

    def of(self, layer: int) -> Recomputed:
        """Returns what layer `layer` recomputes."""
        return self.what if layer % self.every == 0 else "none"


NOTHING = Recompute()


def recomputed(block: Callable[..., T], what: Recomputed, *inputs: Any) -> T:
    """Returns block(*inputs), with the same gradients to the bit, dropout included: for the recomputation a GPU's generator is set
    back, where a tensor on it is among the inputs, or in their lists, tuples and dicts.

    selective raises RuntimeError where an operation writes over a result that is kept: the backward would write a second time. torch 2.11
    does not report results, which leaves only torch's own check; that one misses a write through a view of another shape.
    """
    if what == "none":
        out: T = block(*inputs)
    elif what == "block":
        out = checkpoint(block, *inputs, use_reentrant=False)
    else:
        out = checkpoint(block, *inputs, use_reentrant=False, context_fn=_selective)
    return out


def let_compilers_in() -> None:
    """Lets torch.compile trace blocks, once for all that are alike: a layer's number may differ, and there are more kinds of calls (with
    and without gradients, the first of a kind, which makes a mask, and later ones) than torch expects of a function. Recomputation may
    skip their writes into the context, which the forward has made."""
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    expect_kinds()
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def _selective() -> Any:
    return create_selective_checkpoint_contexts(Policy())


class Policy:
    """Decides which results of one forward of a block are kept."""

    def __init__(self) -> None:
        self._kept: set[int] = set()  # their storages

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """op: an operation of torch.ops that was called with these arguments. torch up to 2.12 asks again in the backward, when another
        tensor may have the memory of a kept one."""
        if op.name() in _KEPT and not _draws(op, args):
            self._kept |= _storages(getattr(ctx, "op_output", ()))
            return CheckpointPolicy.MUST_SAVE
        in_place = op.name().partition(".")[0].endswith("_") and not ctx.is_recompute
        if in_place and self._kept & _storages(args[:1]):
            raise RuntimeError(f"{op.name()} changes the result of a matrix product in place, which recompute=selective keeps")
        return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether a kernel has dropout: if its result were kept, recomputation would not advance the random generator for later draws."""
    if op.name() not in KERNELS:
        return False
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False))
    return bool(given.get("dropout_p"))


def _storages(values: Any) -> set[int]:
    return {x.untyped_storage()._cdata for x in tree_leaves(values) if isinstance(x, torch.Tensor)}
