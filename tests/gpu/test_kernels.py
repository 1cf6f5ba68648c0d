"""Recurrences by flash-linear-attention's kernels: in bf16 as near to float32 as bf16 is."""

from importlib.util import find_spec

import pytest
import torch

from lm.ops.recurrence.kernels import bounds, fused, refused, serves
from lm.ops.recurrence.matrix import Flow, chunked

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("fla") is None, reason="fla-core is not installed (pip install 'slotlm[fla]')"),
]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("channels", [1, 64])
def test_the_kernels_equal_our_own_form(channels: int, delta: bool, several: bool) -> None:
    """Relative errors of whole tensors, gradients included, bf16 keeping 8 bits."""
    source = torch.Generator().manual_seed(0)
    q, k, v, decay, beta = (torch.randn(2, 4, 300, n, generator=source).cuda() for n in (64, 64, 64, channels, 1))
    given = [x.detach().requires_grad_() for x in (q / 8, k / k.norm(dim=-1, keepdim=True), v, -decay.abs() / 16, beta.sigmoid())]
    flow = Flow(*given[: 5 if delta else 4])
    assert not serves(flow, torch.float32) and serves(flow, torch.bfloat16) != refused(flow)
    documents = (torch.arange(300, device="cuda") >= 130).long().expand(2, -1) if several else None
    wanted, _ = chunked(flow, flow.empty(), documents)
    found, _ = fused(flow, torch.bfloat16, ends=None if documents is None else bounds(documents))
    weight, grads = torch.randn(wanted.shape, generator=source).cuda(), [(), ()]
    if not refused(flow):  # with one decay per head fla has no gradient on Hopper, where Triton before 3.7.1 compiles it wrongly
        grads = [torch.autograd.grad((out.float() * weight).sum(), given[: 5 if delta else 4]) for out in (found, wanted)]
    for fast, plain in [(found, wanted), *zip(*grads, strict=True)]:
        assert float((fast.float() - plain).norm() / plain.norm()) < 3e-2
