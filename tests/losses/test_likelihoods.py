"""The likelihood of each label equals torch's cross-entropy, and never more than a chunk of logits exists."""

import pytest
import torch
from torch.nn import functional as F

from lm.losses.likelihoods import label_likelihoods, row_likelihoods, row_scores
from lm.nn.batch import IGNORED
from lm.nn.context import Context
from lm.nn.head import Head, HeadConfig
from lm.nn.norm import RMSNormConfig
from tests.losses.test_tokens import peak_bytes, ragged_labels
from tests.nn.models import near

V, HERE = 97, Context.alone(torch.empty(1, 1, 16))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_likelihoods_and_their_gradients_are_those_of_cross_entropy(
    chunk: int, softcap: float | None, doubles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.losses.tokens.WIDE_CPU", 3 * V)  # a few rows at a time
    head, labels = Head(HeadConfig(bias=True, softcap=softcap), RMSNormConfig(), 16, V), ragged_labels(5, 10, V)
    hidden = torch.randn(5, 10, 16, requires_grad=True)
    for p in head.parameters():
        torch.nn.init.normal_(p)
    found, at = label_likelihoods(labels, chunk)(hidden, head, HERE), labels != IGNORED
    wanted = -F.cross_entropy(head(hidden[at]), labels[at], reduction="none")
    weights = torch.randn(len(wanted))
    given = [hidden, *head.parameters()]
    results = ([each, *torch.autograd.grad((each * weights).sum(), given)] for each in (found, wanted))
    for mine, its in zip(*results, strict=True):
        near(mine, its)
    rows = row_likelihoods(labels)(hidden, head, HERE)
    near(rows, torch.stack([each.sum() for each in wanted.split(at.sum(-1).tolist())]))


def test_rows_without_a_label_have_no_likelihood_and_a_gradient_of_zero() -> None:
    head, hidden = Head(HeadConfig(), RMSNormConfig(), 16, V), torch.randn(2, 10, 16, requires_grad=True)
    found = row_likelihoods(torch.full((2, 10), IGNORED))(hidden, head, HERE)
    assert found.tolist() == [0, 0]
    assert not torch.autograd.grad(found.sum(), hidden)[0].any()


@pytest.mark.parametrize("chunk", [7, 1000])
def test_what_an_objective_reads_of_the_model_is_no_view(chunk: int) -> None:
    """FSDP2 warns of a view that it puts its hook on: an operation in place would lose the hook."""
    head, labels = Head(HeadConfig(labels=["a"], tied=False), RMSNormConfig(), 16, V), ragged_labels(5, 10, 1)
    hidden = torch.randn(5, 10, 16, requires_grad=True)
    for read in (label_likelihoods(labels, chunk), row_likelihoods(labels), row_scores(labels)):
        found = read(hidden, head, HERE)
        assert found.requires_grad and found._base is None


def test_in_bf16_likelihoods_are_float32_and_their_gradients_as_near_as_torchs() -> None:
    head, labels = Head(HeadConfig(), RMSNormConfig(), 16, V), torch.randint(0, V, (4, 50))
    hidden, truth = torch.randn(4, 50, 16, requires_grad=True), []
    exact = -F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="none")
    with torch.autocast("cpu", torch.bfloat16):
        found = label_likelihoods(labels, 60)(hidden, head, HERE)
        plain = -F.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten(), reduction="none")
    assert found.dtype == torch.float32
    for each in (exact, plain, found):
        truth.append(torch.cat([g.flatten() for g in torch.autograd.grad(each.sum(), (hidden, head.weight))]))
    assert (truth[2] - truth[0]).norm() < 1.1 * (truth[1] - truth[0]).norm()


def test_peak_memory_is_that_of_a_chunk_of_logits() -> None:
    head, hidden, labels = Head(HeadConfig(), RMSNormConfig(), 8, 5000), torch.randn(1, 4096, 8), torch.randint(0, 5000, (1, 4096))

    def peak(chunk: int) -> int:
        return peak_bytes(lambda: label_likelihoods(labels, chunk)(hidden.requires_grad_(), head, HERE).sum().backward())

    logits = 4 * 4096 * 5000
    assert peak(4096) > logits
    assert peak(256) < logits / 4
