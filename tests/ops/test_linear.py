"""The product of a linear layer by oneDNN's kernels, where MKL's are slow."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lm.nn.linear import Linear, Out
from lm.ops import linear
from lm.ops.linear import outer_into, product, product_into

SHAPES = [((3, 5, 24), 40), ((7, 40), 24), ((1, 24), 40)]


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine and the size."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(linear, "_MKL_IS_SLOW", True)
    monkeypatch.setattr(linear, "_WORTH", 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "out"), SHAPES)
def test_the_product_and_its_gradients_equal_torchs(shape: tuple[int, ...], out: int, bias: bool) -> None:
    source = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=source).requires_grad_() for size in (shape, (out, shape[-1]), (out,))[: 3 if bias else 2]]
    found, wanted = product(*given), F.linear(*given)
    assert "OneDNN" in str(found.grad_fn)
    weight = torch.randn(wanted.shape, generator=source)
    grads = ([*torch.autograd.grad((each * weight).sum(), given)] for each in (found, wanted))
    for a, b in [(found, wanted), *zip(*grads, strict=True)]:
        assert a.shape == b.shape and a.is_contiguous()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("n", "ins", "outs"), [(7, 24, 40), (7, 40, 24), (0, 8, 4)])
def test_what_is_written_into_a_tensor_is_the_product(n: int, ins: int, outs: int) -> None:
    x, weight, gradient = torch.randn(n, ins), torch.randn(outs, ins), torch.randn(n, outs)
    product_into(out := torch.full((n, outs), torch.nan), x, weight)
    torch.testing.assert_close(out, x @ weight.t(), atol=1e-5, rtol=1e-5)
    outer_into(out := torch.full((outs, ins), torch.nan), gradient, x)
    torch.testing.assert_close(out, gradient.t() @ x, atol=1e-5, rtol=1e-5)


def test_only_what_is_asked_for_has_a_gradient() -> None:
    x, weight = torch.randn(6, 8), torch.randn(4, 8)
    for wanted in ((True, False), (False, True)):
        given = [each.detach().requires_grad_(of) for each, of in zip((x, weight), wanted, strict=True)]
        product(*given).sum().backward()
        assert tuple(each.grad is not None for each in given) == wanted
    assert product(x, weight).grad_fn is None


@pytest.mark.parametrize("layer", [Linear, Out])
def test_what_the_kernel_does_not_take_goes_torchs_way(layer: type[nn.Linear]) -> None:
    made = layer(8, 4)
    torch.nn.init.ones_(made.weight)
    x = torch.randn(6, 8)
    assert "OneDNN" in str(made(x).grad_fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(x).dtype == torch.bfloat16
    for dtype in (torch.float64, torch.bfloat16):
        assert "OneDNN" not in str(layer(8, 4, dtype=dtype)(x.to(dtype)).grad_fn)
    for few in (x[0], x[:0]):
        assert "OneDNN" not in str(made(few).grad_fn) and made(few).shape == (*few.shape[:-1], 4)
    with torch.device("meta"):
        assert layer(8, 4)(torch.empty(6, 8)).is_meta


@pytest.mark.slow
def test_a_compiled_layer_has_the_same_product() -> None:
    source = torch.Generator().manual_seed(0)
    layer, x = Linear(16, 40), torch.randn(3, 5, 16, generator=source)
    for p in layer.parameters():
        torch.nn.init.normal_(p, generator=source)
    grads = []
    for made in (layer, torch.compile(layer, fullgraph=True)):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        made(given).square().sum().backward()
        grads.append([given.grad, layer.weight.grad, layer.bias.grad])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_the_same_numbers_have_the_same_bits_wherever_they_lie() -> None:
    """So that a run repeats itself."""
    source = torch.Generator().manual_seed(0)
    x, weight = torch.randn(130 * 48, generator=source), torch.randn(96 * 48, generator=source)
    first = None
    for offset in range(17):
        placed = [torch.empty(len(each) + 17)[offset : offset + len(each)].copy_(each) for each in (x, weight)]
        given = [placed[0].view(130, 48).requires_grad_(), placed[1].view(96, 48).requires_grad_()]
        out = product(*given)
        found = [out, *torch.autograd.grad(out.square().sum(), given)]
        first = first or found
        assert all(map(torch.equal, found, first))
