"""The recurrence by Triton kernels of flash-linear-attention, on CUDA: github.com/fla-org/flash-linear-attention, here fla-core >= 0.6."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.nn.mixers.recurrence import Flow

_WIDEST = 256  # channels of a key


def serves(flow: Flow, dtype: torch.dtype) -> bool:
    """Whether the kernels take it.  dtype: of what the flow was made of; what was float32 stays with products that are.

    A compiled model has our own form, which Inductor fuses: theirs would break its graph in every layer.
    """
    if not flow.q.is_cuda or dtype not in (torch.bfloat16, torch.float16) or flow.q.shape[-1] > _WIDEST:
        return False
    return not torch.compiler.is_compiling() and _installed()


def bounds(documents: Tensor) -> Tensor:
    """Returns where documents begin in the rows one behind the other, and where the last ends; waits for the device.  documents: (b, s)."""
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True).flatten()
    return F.pad(begins.nonzero().squeeze(1), (0, 1), value=documents.numel()).int()


def fused(flow: Flow, dtype: torch.dtype, state: Tensor | None = None, ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `chunked`, of queries, keys and values in `dtype`; decays, states and sums are float32.

    state: (b, h, k, v), None for an empty one; ends: `bounds` of documents, each of which has an empty state first and one to return.
    """
    by_channel = flow.decay.shape[-1] > 1
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (flow.q, flow.k, flow.v))  # (b, h, s, c) -> (b, s, h, c)
    rates = [x.transpose(1, 2) for x in (flow.decay, flow.beta) if x is not None]
    rates = [x if i == 0 and by_channel else x.squeeze(-1) for i, x in enumerate(rates)]
    each = [q, k, v, *rates] if ends is None else [x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, *rates)]
    kernel = _kernel(by_channel, flow.beta is not None)
    out, last = kernel(*each, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=ends)
    return out.view(v.shape).transpose(1, 2), last


@cache
def _installed() -> bool:
    return find_spec("fla") is not None and find_spec("triton") is not None


def _kernel(by_channel: bool, delta: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    from fla import ops  # here: importing it takes seconds

    added, replaced = (ops.chunk_gla, ops.chunk_kda) if by_channel else (ops.chunk_simple_gla, ops.chunk_gated_delta_rule)
    kernel: Callable[..., tuple[Tensor, Tensor]] = replaced if delta else added
    return kernel
