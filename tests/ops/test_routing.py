"""Where tokens go and how evenly, against loops over the papers' sums."""

import math

import pytest
import torch
from torch import Tensor

from lm.ops.routing import agreement, capacity_of, loads, squares_of_log_z, tokens, within_capacity, within_groups

B, S, E, K = 2, 6, 4, 2
REAL = torch.tensor([[False, True, True, True, True, True], [False, False, False, True, True, True]])


def whole(x: Tensor) -> Tensor:
    """What one rank knows is all there is."""
    return x


def drawn() -> tuple[Tensor, Tensor]:
    """Scores (b, s, e), and each token's best experts (b, s, k)."""
    scores = torch.randn(B, S, E).softmax(-1)
    return scores, scores.topk(K, dim=-1).indices


def test_loads_count_the_choices_of_tokens() -> None:
    _, experts = drawn()
    found = loads(experts, REAL, E)
    for row in range(B):
        chosen = [e for t in range(S) if REAL[row, t] for e in experts[row, t].tolist()]
        assert found[row].tolist() == [chosen.count(e) for e in range(E)]


def test_loads_are_counted_in_float32_where_everything_else_is_bf16() -> None:
    """Seen to fail: bf16 knows no 257, and a router's bias moves by the sign of what is left of such numbers."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)  # as Lightning does for bf16-true
        found = loads(torch.zeros(1, 1001, 1, dtype=torch.int64), torch.ones(1, 1001, dtype=torch.bool), E)
    finally:
        torch.set_default_dtype(default)
    assert found.dtype == torch.float32 and found.tolist() == [[1001, 0, 0, 0]]


def test_the_balance_of_a_row_is_that_of_the_paper() -> None:
    scores, experts = drawn()
    counts, n = loads(experts, REAL, E), tokens(REAL, whole)
    found = agreement(counts, scores, REAL, n, K, whole)
    for row in range(B):
        at = REAL[row].nonzero().flatten().tolist()
        f = [sum(e in experts[row, t] for t in at) / (len(at) * K) for e in range(E)]
        p = [sum(float(scores[row, t, e]) for t in at) / len(at) for e in range(E)]
        assert found[row].item() == pytest.approx(sum(map(math.prod, zip(f, p, strict=True))), rel=1e-5)


def test_the_squares_of_log_z_are_of_tokens() -> None:
    logits = torch.randn(B, S, E)
    found = squares_of_log_z(logits, REAL, whole)
    for row in range(B):
        each = [math.log(sum(map(math.exp, logits[row, t].tolist()))) ** 2 for t in range(S) if REAL[row, t]]
        assert found[row].item() == pytest.approx(sum(each), rel=1e-5)


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25])
def test_an_expert_takes_its_capacity_of_a_row_first_choices_first(factor: float) -> None:
    _, experts = drawn()
    capacity = capacity_of(REAL, K, E, factor)
    assert capacity.flatten().tolist() == [math.ceil(factor * n * K / E) for n in (5, 3)]
    kept = within_capacity(experts, REAL, E, capacity)
    for row in range(B):
        room = [int(capacity[row])] * E
        for choice in range(K):
            for t in range(S):
                if REAL[row, t]:
                    expert = int(experts[row, t, choice])
                    assert kept[row, t, choice] == (room[expert] > 0)
                    room[expert] -= 1


@pytest.mark.parametrize("counted", [1, 2])
def test_experts_outside_of_the_best_groups_are_closed(counted: int) -> None:
    scores = torch.rand(B, S, 6)
    found = within_groups(scores, 3, 2, counted)
    for row in range(B):
        for t in range(S):
            groups = [sum(sorted(scores[row, t, 2 * g : 2 * g + 2].tolist(), reverse=True)[:counted]) for g in range(3)]
            worst = groups.index(min(groups))
            closed = found[row, t].isinf().nonzero().flatten().tolist()
            assert closed == [2 * worst, 2 * worst + 1]
    assert torch.equal(found[found.isfinite()], scores[found.isfinite()]) and within_groups(scores, 3, 3, counted) is scores
