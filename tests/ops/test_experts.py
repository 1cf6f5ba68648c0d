"""Tokens spread over their experts and brought back, against indexing."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from lm.ops import experts, linear
from lm.ops.experts import Sorting, by_expert

N, K, TOKENS, D = 5, 3, 17, 8


def choices(tokens: int = TOKENS) -> Tensor:
    """(t, k); the last expert is nobody's."""
    return torch.rand(tokens, N - 1).argsort(-1)[:, :K] if tokens else torch.empty(0, K, dtype=torch.long)


@pytest.mark.parametrize("tokens", [TOKENS, 1, 0])
def test_rows_lie_by_expert_and_each_choice_knows_its_row(tokens: int) -> None:
    sorting = Sorting(chosen := choices(tokens), N)
    ends = sorting.ends.tolist()
    assert ends[-1] == tokens * K == len(sorting.token)
    for i, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        assert sorting.token[first:last].tolist() == (chosen == i).nonzero()[:, 0].tolist()
    assert torch.equal(sorting.chosen[sorting.back], chosen)


def test_spreading_and_gathering_and_their_gradients_equal_indexing(doubles: None) -> None:
    sorting = Sorting(choices(), N)
    x, weights, rows = torch.randn(TOKENS, D), torch.rand(TOKENS, K), torch.randn(TOKENS * K, D)
    for given in (x, weights, rows):
        given.requires_grad_()
    pairs = [
        (sorting.spread(x), x[sorting.token], [x]),
        (sorting.gather(rows, weights), (rows[sorting.back] * weights.unsqueeze(-1)).sum(1), [rows, weights]),
    ]
    for found, wanted, inputs in pairs:
        gradient = torch.randn_like(wanted)
        torch.testing.assert_close(found, wanted)
        for mine, its in zip(*(torch.autograd.grad(out, inputs, gradient) for out in (found, wanted)), strict=True):
            torch.testing.assert_close(mine, its)


def test_bfloat16_is_rounded_once_in_both_directions() -> None:
    sorting = Sorting(torch.arange(64).expand(3, 64).contiguous(), 64)
    rows, weights, gradient = torch.randn(3 * 64, D).bfloat16(), torch.rand(3, 64), torch.randn(3, D).bfloat16()
    wanted = (rows.double()[sorting.back] * weights.double().unsqueeze(-1)).sum(1)
    out = sorting.gather(rows, weights.requires_grad_())
    assert torch.equal(out, wanted.float().bfloat16())
    (found,) = torch.autograd.grad(out, weights, gradient)
    torch.testing.assert_close(found.double(), (rows.double()[sorting.back] * gradient.double().unsqueeze(1)).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [[33, 0, 18, 101, 3], [0, 0, 67], [35, 70], [17, 0], [15, 16, 1], [0]], ids=str)
def test_rows_multiplied_beyond_an_experts_own_change_nothing(rows: list[int], doubles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, chosen = torch.tensor(rows).cumsum(0).int(), torch.repeat_interleave(torch.tensor(rows))
    x, weight = torch.randn(sum(rows), 8, requires_grad=True), torch.randn(len(rows), 16, 8, requires_grad=True)
    gradient = torch.randn(sum(rows), 16)
    monkeypatch.setattr(experts, "by_onednn", lambda x, multiplications: True)
    found, wanted = by_expert(x, weight, None, ends, chosen), torch.einsum("nd,nod->no", x, weight[chosen])
    torch.testing.assert_close(found, wanted)
    for mine, its in zip(*(torch.autograd.grad(out, [x, weight], gradient) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, its)


def test_few_sizes_are_multiplied_of_the_many_that_occur() -> None:
    """For each of which oneDNN would generate code."""
    x = torch.empty(4096, 1, dtype=torch.bfloat16)
    spans = [experts._span(x, 0, n, 1) for n in range(1, 4097)]
    assert all(begin == 0 and n <= end <= 1.125 * n for n, (begin, end) in enumerate(spans, 1))
    assert len(set(spans)) == 16 + 8 * 8


def test_products_that_torch_leaves_to_mkl_are_of_an_experts_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 small ones, of which rounding 33 rows to 36 would cost a tenth."""
    monkeypatch.setattr(linear, "_MKL_IS_SLOW", True)
    assert [experts._span(torch.empty(64, 512), 0, 33, width) for width in (64, 512)] == [(0, 33), (0, 36)]
    assert experts._span(torch.empty(64, 512, dtype=torch.float64), 0, 33, 512) == (0, 33)


@pytest.mark.slow
def test_a_product_by_expert_loads_no_compiler() -> None:
    """Which would take a second and a half."""
    program = (
        "import sys, torch; from lm.ops.experts import by_expert; x, w = torch.ones(4, 8, requires_grad=True), torch.ones(2, 8, 8);"
        "by_expert(x, w, None, torch.tensor([1, 4], dtype=torch.int32), torch.tensor([0, 1, 1, 1])).sum().backward();"
        "assert x.grad.sum() == 256; print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
