"""What is rounded where: norms and routers in float32 whatever comes in, experts in the type of autocast, rotations in float32."""

from typing import Any

import pytest
import torch

from lm.nn.ffn import experts as experts_module
from lm.nn.ffn.experts import Experts
from lm.nn.ffn.mlp import MLPConfig
from lm.nn.norm import RMSNorm
from lm.ops.norm import fast_rms_norm, rms_norm
from lm.ops.rotation import rotate, rotate_half
from lm.schema import from_tree
from tests.nn.models import EXPERT, GPT_OSS
from tests.nn.test_moe import D, context, drawn, inputs, mixture
from tests.nn.test_references import grads


@pytest.mark.parametrize("expert", [EXPERT, GPT_OSS])
def test_under_autocast_every_product_of_the_grouped_experts_is_of_its_type(
    expert: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grouped kernel takes bf16 alone, and norms hand on float32."""
    experts, x = drawn(Experts(from_tree(MLPConfig, expert), 5, D)), torch.randn(12, D)
    weights, chosen = torch.rand(12, 2), torch.randint(0, 5, (12, 2))
    seen: list[torch.dtype] = []
    each = experts_module.by_expert
    monkeypatch.setattr(experts_module, "by_expert", lambda x, *given: (seen.append(x.dtype), each(x, *given))[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, plain = experts.grouped(x, chosen, weights), experts.loop(x, chosen, weights)
    assert seen == [torch.bfloat16] * 3
    torch.testing.assert_close(out.float(), plain.float(), atol=0.05, rtol=0.05)  # roundings of bf16, of values of size 1


def test_the_router_stays_in_float32_under_autocast() -> None:
    layer, x = mixture(router={"kind": "softmax", "bias": True}), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing, out = layer.router(x), layer(x, context())
    torch.testing.assert_close(routing.logits, layer.router(x).logits)
    torch.testing.assert_close(out.float(), layer(x, context()), atol=0.1, rtol=0.1)  # roundings of bf16


@pytest.mark.parametrize("size", [3.0, 3e-3])  # the small one is of the order of eps
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])  # some roundings of each
def test_fast_rms_norm_equals_the_reference(dtype: torch.dtype, tolerance: float, size: float) -> None:
    norm = RMSNorm(48, 1e-5)
    norm.weight.data.normal_()
    x = (torch.randn(3, 7, 48) * size).to(dtype).requires_grad_()
    fast, plain = norm(x), rms_norm(x, norm.weight, 1e-5)
    torch.testing.assert_close(fast, plain, atol=tolerance, rtol=tolerance)
    for a, b in zip(grads(fast, x, norm.weight), grads(plain, x, norm.weight), strict=True):
        torch.testing.assert_close(a, b, atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])  # gradients differ by some roundings
def test_fast_rms_norm_without_weight_equals_that_of_ones_to_the_bit(dtype: torch.dtype, tolerance: float) -> None:
    ones, x = torch.ones(48), torch.randn(3, 7, 48).to(dtype).requires_grad_()
    bare, weighted = fast_rms_norm(x, None, 1e-5), fast_rms_norm(x, ones, 1e-5)
    assert bare.dtype == dtype and torch.equal(bare, weighted)
    assert torch.equal(fast_rms_norm(x.detach(), None, 1e-5), fast_rms_norm(x.detach(), ones.to(dtype), 1e-5))
    torch.testing.assert_close(*grads(bare, x), *grads(weighted, x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 12])
def test_the_fast_rotation_equals_the_plain_one_in_values_and_gradients(width: int, dtype: torch.dtype) -> None:
    """Both turn in float32, which the comparisons of models in float64 never see; dimensions from 8 on pass through."""
    x, angles = torch.randn(2, 3, 5, width).to(dtype).requires_grad_(), torch.randn(5, 4)
    weights = torch.randn(2, 3, 5, width).to(dtype)
    results = []
    for form in (rotate, rotate_half):
        out = form(x, angles.cos(), angles.sin())
        results.append([out, *torch.autograd.grad(out, x, weights)])
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7  # of bf16: a sum may be rounded to its neighbour
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)
