"""Norms against their formulas."""

import torch

from lm.ops.norm import fast_rms_norm, rms_norm, rms_norm_of_groups


def test_float64_stays_float64_with_a_gradient() -> None:
    """Seen to fail: the fused backward keeps its sums in float32."""
    x, weight = torch.randn(3, 8, dtype=torch.float64, requires_grad=True), torch.rand(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: fast_rms_norm(x, weight, 1e-6), (x, weight))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(fast_rms_norm(x, weight, 1e-6), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: fast_rms_norm(x, None, 1e-6), (x,))


def test_groups_are_normed_each_by_itself_with_weights_of_all_or_of_one() -> None:
    x, weights = torch.randn(2, 3, 4), torch.rand(12)
    found = rms_norm_of_groups(x, weights, 1e-6)
    each = [rms_norm(x[:, i], weights[4 * i : 4 * i + 4], 1e-6) for i in range(3)]
    assert torch.equal(found, torch.stack(each, dim=1))
    assert torch.equal(rms_norm_of_groups(x, weights[:4], 1e-6), rms_norm(x, weights[:4], 1e-6))
