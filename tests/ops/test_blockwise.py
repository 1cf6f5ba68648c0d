"""The blockwise backward of torch's fused attention: its gradients are those of the reference, and it is taken where it is faster."""

import pytest
import torch
from torch import Tensor

from lm.ops.attention import attend as backends
from lm.ops.attention import blockwise
from lm.ops.attention.attend import Scoring, reference, sdpa
from lm.ops.attention.blockwise import faster
from lm.ops.attention.mask import Mask, arange_positions
from tests.nn.models import CLOSE
from tests.ops.test_masks import gradients

N = 23  # keys: blocks of 8 queries leave a rest
ROW = arange_positions(N, torch.device("cpu"))
LEFT = torch.stack([torch.cat([torch.full((4,), -1), torch.arange(9), torch.arange(10)]), torch.arange(N)])
DOCUMENTS = torch.stack([torch.tensor([-1] * 4 + [0] * 9 + [1] * 10), torch.zeros(N, dtype=torch.int64)])
MASKS = {
    "plain": (Mask(ROW, ROW, square=True), None),
    "both ways": (Mask(ROW, ROW, causal=False, square=True), None),
    "window": (Mask(ROW, ROW, square=True), 5),
    "documents and padding": (Mask(LEFT, LEFT, DOCUMENTS, DOCUMENTS), None),
    "prefix": (Mask(LEFT, LEFT, DOCUMENTS, DOCUMENTS, k_prefix=LEFT < 3), 6),
    "heads": (Mask(ROW, ROW, explicit=torch.rand(2, 6, N, N, generator=torch.Generator().manual_seed(1)) > 0.4), None),
    "another row": (Mask(LEFT[:, -N:], torch.arange(13).expand(2, -1), causal=False), None),
}


def inputs(heads: tuple[int, int], n_k: int = N) -> list[Tensor]:
    """Heads of a token side by side, as projections give them."""
    source = torch.Generator().manual_seed(0)
    shapes = ((2, N, heads[0], 8), (2, n_k, heads[1], 8), (2, n_k, heads[1], 8))
    return [torch.randn(shape, generator=source).transpose(1, 2).requires_grad_() for shape in shapes]


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize(
    "scores", [2000, pytest.param(1, marks=pytest.mark.slow), pytest.param(2**20, marks=pytest.mark.slow)]
)  # of a block: one key head, some of a row's, and all rows
def test_blockwise_gradients_equal_those_of_the_reference(
    name: str, heads: tuple[int, int], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "QUERIES", 8)
    monkeypatch.setattr(blockwise, "SCORES", scores)
    monkeypatch.setattr(backends, "faster", lambda *given: True)
    monkeypatch.setattr(blockwise, "multiplied", lambda v: True)
    mask, window = MASKS[name]
    n_k = mask.k_positions.shape[1]
    qkv, how = inputs(heads, n_k), Scoring(0.7, window)
    for bias, sinks in ((None, None), (-torch.rand(1, heads[0], N, n_k), torch.randn(heads[0], requires_grad=True))):
        fast, plain = (attend(*qkv, mask, bias, how, sinks) for attend in (sdpa, reference))
        wanted = qkv if sinks is None else [*qkv, sinks]
        torch.testing.assert_close(fast, plain, **CLOSE)
        expected = gradients(plain, wanted)
        torch.testing.assert_close(gradients(fast, wanted), expected, **CLOSE)
        assert all(g.isfinite().all() and g.abs().max() > 0 for g in expected)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rows, heads", [(1, 6), (2, 6), (1, 1), (2, 1)])  # that differ in the bias
@pytest.mark.parametrize("scores", [2000, pytest.param(1, marks=pytest.mark.slow), pytest.param(2**20, marks=pytest.mark.slow)])
def test_a_learned_bias_has_its_gradient_too(name: str, rows: int, heads: int, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "QUERIES", 8)
    monkeypatch.setattr(blockwise, "SCORES", scores)
    monkeypatch.setattr(backends, "faster", lambda *given: True)
    monkeypatch.setattr(blockwise, "multiplied", lambda v: True)
    mask, window = MASKS[name]
    n_k = mask.k_positions.shape[1]
    qkv, bias = inputs((6, 2), n_k), torch.randn(rows, heads, N, n_k, requires_grad=True)
    fast, plain = (attend(*qkv, mask, bias, Scoring(0.7, window)) for attend in (sdpa, reference))
    torch.testing.assert_close(fast, plain, **CLOSE)
    expected = gradients(plain, [*qkv, bias])
    torch.testing.assert_close(gradients(fast, [*qkv, bias]), expected, **CLOSE)
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in expected)


@pytest.mark.parametrize("rows", [None, 1, 2])
def test_in_bf16_the_gradients_are_as_near_to_the_truth_as_those_of_torch(rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large scores, of which bf16 knows the first 8 bits: what is taken from them before they are rounded makes the difference.  rows: of
    a bias, which is learned here, and not in torch's kernel, which has no gradient for it."""
    monkeypatch.setattr(blockwise, "QUERIES", 8)
    source, how = torch.Generator().manual_seed(2), Scoring(0.7)
    exact = [x.detach().mul(3).bfloat16() for x in inputs((6, 2))]
    bias = None if rows is None else torch.randn(rows, 6, N, N, generator=source).bfloat16()
    far, of_bias = [], []
    for taken, dtype in ((False, torch.float64), (False, torch.bfloat16), (True, torch.bfloat16)):
        monkeypatch.setattr(backends, "faster", lambda *given, taken=taken: taken)
        monkeypatch.setattr(blockwise, "multiplied", lambda v, taken=taken: taken)
        qkv = [x.to(dtype).requires_grad_() for x in exact]
        learned = [] if bias is None else [bias.to(dtype).requires_grad_(taken or dtype == torch.float64)]
        wanted = [*qkv, *(each for each in learned if each.requires_grad)]
        found = gradients(sdpa(*qkv, Mask(ROW, ROW, square=True), *(learned or [None]), how), wanted)
        far.append(torch.cat([g.double().flatten() for g in found[:3]]))
        of_bias += [g.double() for g in found[3:]]
    truth, torchs, ours = far
    assert 0 < (ours - truth).norm() < 1.5 * (torchs - truth).norm()
    assert not of_bias or 0 < (of_bias[1] - of_bias[0]).norm() < 0.02 * of_bias[0].norm()


def test_the_blockwise_backward_is_taken_for_bf16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where the hardware has it, without dropout, and where there is a gradient, be it of a bias alone."""
    monkeypatch.setattr(blockwise, "NATIVE", True)
    qkv = [x.bfloat16() for x in inputs((6, 6))]
    assert faster(*qkv, None, 0.0) and faster(*qkv, torch.zeros(N, N), 0.0)
    assert faster(*(x.detach() for x in qkv), torch.zeros(N, N, requires_grad=True), 0.0) and not faster(*qkv, None, 0.1)
    assert not faster(*inputs((6, 6)), None, 0.0) and not faster(*(x.detach() for x in qkv), None, 0.0)
    assert not faster(qkv[0], qkv[1], qkv[2][..., :4], None, 0.0) and not faster(*(x.to("meta") for x in qkv), None, 0.0)
    with torch.no_grad():
        assert not faster(*qkv, None, 0.0)
    monkeypatch.setattr(blockwise, "NATIVE", False)
    assert not faster(*qkv, None, 0.0)


def test_written_out_scores_are_in_float32_under_autocast_too() -> None:
    q, k, v = (20 * x.detach().bfloat16() for x in inputs((6, 6)))
    mask, how = Mask(ROW, ROW), Scoring(0.3, softcap=50.0)
    expected = reference(q, k, v, mask, None, how)
    with torch.autocast("cpu", torch.bfloat16):
        assert reference(q, k, v, mask, None, how).equal(expected)


@pytest.mark.slow
def test_compiled_attention_has_the_same_gradients_by_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "NATIVE", True)  # products of bf16 are right on every CPU, if not fast
    qkv = [x.detach().bfloat16().requires_grad_() for x in inputs((6, 2))]
    sinks = torch.randn(6, requires_grad=True)
    mask, how = MASKS["plain"][0], Scoring(0.7, None)
    found, operations = [], []
    for attend_ in (sdpa, torch.compile(sdpa, fullgraph=True)):
        with torch.profiler.profile() as seen:
            found.append(gradients(attend_(*qkv, mask, None, how, sinks), [*qkv, sinks]))
        operations.append({event.name for event in seen.events()})
    torch.testing.assert_close(*found, atol=1e-2, rtol=2e-2)
    assert ["lm::blockwise_backward" in names for names in operations] == [False, True]


@pytest.mark.slow
def test_compiled_attention_with_a_learned_bias_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: the gradient had the strides of the bias, which the compiler was told would be others."""
    monkeypatch.setattr(blockwise, "NATIVE", True)
    bias = torch.randn(1, N, N, 6).permute(0, 3, 1, 2).requires_grad_()  # as T5's is made
    given = [*(x.detach().bfloat16().requires_grad_() for x in inputs((6, 2))), bias]
    mask, how = MASKS["window"][0], Scoring(0.7, 5)
    found = [gradients(attend_(*given[:3], mask, given[3], how), given) for attend_ in (sdpa, torch.compile(sdpa, fullgraph=True))]
    torch.testing.assert_close(*found, atol=1e-2, rtol=2e-2)
