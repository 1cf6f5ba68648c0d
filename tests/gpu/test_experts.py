"""The grouped kernel equals the loop over experts, gradients included, in bf16 weights and under autocast."""

import pytest
import torch
from torch.nn import functional as F

from lm.nn.ffn.experts import Experts
from lm.nn.ffn.mlp import MLPConfig
from lm.schema import from_tree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_grouped_kernel_equals_the_loop(autocast: bool, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative errors of whole tensors, bf16 keeping 8 bits; the last expert gets no token."""
    experts = Experts(from_tree(MLPConfig, {"kind": "mlp", "hidden": 96, "bias": bias}), 5, 64).cuda()
    source = torch.Generator().manual_seed(0)
    for p in experts.parameters():
        p.data.copy_(torch.randn(p.shape, generator=source) * 0.2)
    x = torch.randn(200, 64, generator=source).cuda()
    weights, chosen = torch.rand(200, 2, generator=source).cuda(), torch.randint(0, 4, (200, 2), generator=source).cuda()
    exact = experts.loop(x, chosen, weights)
    expected = [exact, *torch.autograd.grad(exact.square().sum(), list(experts.parameters()))]
    calls: list[int] = []
    kernel = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *given, **options: (calls.append(1), kernel(*given, **options))[1])
    if not autocast:
        experts, x, weights = experts.bfloat16(), x.bfloat16(), weights.bfloat16()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        out = experts.grouped(x, chosen, weights)
    found = [out, *torch.autograd.grad(out.float().square().sum(), list(experts.parameters()))]
    assert len(calls) == 3
    for fast, plain in zip(found, expected, strict=True):
        assert float((fast.float() - plain).norm() / plain.norm()) < 3e-2
