"""The recurrence of a matrix by the fastest path: Triton kernels of flash-linear-attention on CUDA, our own chunks elsewhere.

github.com/fla-org/flash-linear-attention, here fla-core >= 0.6.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from lm.ops.attention.mask import Mask
from lm.ops.compiling import has_triton
from lm.ops.recurrence.matrix import Flow, chunked

_WIDEST = 256  # channels of a key


def serves(flow: Flow, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels take this flow.  dtype: of the tensors that the flow was made of; float32 ones stay with float32 products.

    A compiled model uses our own form, which Inductor fuses: the kernels would break its graph in every layer.
    """
    if not flow.q.is_cuda or dtype not in (torch.bfloat16, torch.float16) or flow.q.shape[-1] > _WIDEST:
        return False
    return not torch.compiler.is_compiling() and _installed() and not (torch.is_grad_enabled() and refused(flow))


def bounds(documents: Tensor) -> Tensor:
    """Returns where documents begin in the joined rows, and where the last one ends; waits for the device.  documents: (b, s)."""
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True).flatten()
    return F.pad(begins.nonzero().squeeze(1), (0, 1), value=documents.numel()).int()


def fused(flow: Flow, dtype: torch.dtype, state: Tensor | None = None, ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `chunked`, with queries, keys and values in `dtype`; decays, states and sums are float32.

    state: (b, h, k, v), None for an empty one; ends: `bounds` of documents, each of which begins with an empty state and returns its last.
    """
    by_channel = flow.decay.shape[-1] > 1
    given = [x.to(dtype) for x in (flow.q, flow.k, flow.v)] + [flow.decay if by_channel else flow.decay.squeeze(-1)]
    given += [] if flow.beta is None else [flow.beta.squeeze(-1)]
    given = [x.transpose(1, 2) for x in given]  # (b, h, s, ..) -> (b, s, h, ..)
    if ends is not None:
        given = [x.flatten(0, 1).unsqueeze(0) for x in given]
    kernel = _kernel(by_channel, flow.beta is not None)
    out, last = kernel(*given, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=ends)
    b, _, s, _ = flow.v.shape
    return out.reshape(b, s, *out.shape[2:]).transpose(1, 2), last


def fastest(
    flow: Flow, dtype: torch.dtype, mask: Mask, state: Tensor | None = None, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `chunked`, state None for an empty one.  dtype: as in `serves`; mask: keeps the bounds of documents for all layers."""
    if serves(flow, dtype):
        ends = None if documents is None else mask.once("bounds of documents", lambda: bounds(documents))
        return fused(flow, dtype, state, ends)
    return chunked(flow, flow.empty() if state is None else state, documents)


@cache
def _installed() -> bool:
    return find_spec("fla") is not None and has_triton()


def refused(flow: Flow) -> bool:
    """Whether fla refuses the gradient of this flow: on Hopper some versions of Triton compile the kernel for one decay per head wrongly,
    unless TileLang does it (flash-linear-attention's issue 640)."""
    return flow.decay.shape[-1] == 1 and torch.cuda.get_device_capability(flow.q.device)[0] == 9 and _wrong_on_hopper()


@cache
def _wrong_on_hopper() -> bool:
    import triton

    return find_spec("tilelang") is None and "3.4.0" <= TorchVersion(triton.__version__) < "3.7.1"


def _kernel(by_channel: bool, delta: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    from fla import ops  # here: importing it takes seconds

    kernel: Callable[..., tuple[Tensor, Tensor]]
    if delta:
        kernel = ops.chunk_kda if by_channel else ops.chunk_gated_delta_rule
    else:
        kernel = ops.chunk_gla if by_channel else ops.chunk_simple_gla
    return kernel
