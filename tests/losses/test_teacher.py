"""The divergence from a teacher, against torch's own, and its gradient in chunks against autograd's."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.cross_entropy import losses_and_gradient, token_losses
from lm.losses.teacher import SoftTargets
from lm.losses.tokens import chunked_loss
from lm.nn.batch import IGNORED
from lm.nn.head import Head, HeadConfig
from lm.nn.norm import RMSNormConfig
from tests.nn.models import near

V = 97


def head_of(d: int, v: int = V, seed: int = 0) -> Head:
    torch.manual_seed(seed)
    return Head(HeadConfig(), RMSNormConfig(), d, v)


def by_hand(logits: Tensor, theirs: Tensor, labels: Tensor, weight: float, t: float = 1.0) -> Tensor:
    """Of labelled rows, by torch's cross_entropy and kl_div."""
    mine, theirs, labels = logits[labels != IGNORED], theirs[labels != IGNORED], labels[labels != IGNORED]
    apart = t * t * F.kl_div((mine / t).log_softmax(-1), (theirs / t).log_softmax(-1), reduction="sum", log_target=True)
    return (1 - weight) * F.cross_entropy(mine, labels, reduction="sum") + weight * apart


@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}])
@pytest.mark.parametrize(("weight", "t"), [(0.3, 1.0), (1.0, 1.0), (0.3, 2.5), (1.0, 0.5)])
def test_a_chunked_loss_beside_a_teacher_is_the_plain_one_with_its_gradients(weight: float, t: float, more: dict[str, float]) -> None:
    head, teacher = head_of(16), head_of(24, seed=1)
    hidden, theirs = torch.randn(50, 16, requires_grad=True), 4 * torch.randn(50, 24)
    labels = torch.randint(0, V, (50,)).masked_fill(torch.rand(50) < 0.3, IGNORED)
    plain = token_losses(head(hidden), labels, **more, soft=(teacher(theirs) / t).softmax(-1).detach(), weight=weight, temperature=t)
    if not more:
        near(plain.total, by_hand(head(hidden), teacher(theirs), labels, weight, t))
    wanted = torch.autograd.grad(plain.total, (hidden, head.weight))
    for chunk in (7, 1000):
        sums = chunked_loss(hidden, labels, head, chunk=chunk, answers=labels, teacher=SoftTargets(theirs, teacher, weight, t), **more)
        near(sums.total, plain.total)
        near(sums.nll, plain.nll)
        for found, right in zip(torch.autograd.grad(sums.total, (hidden, head.weight)), wanted, strict=True):
            near(found, right)
        apart, n = sums.metrics["teacher_kl"]
        near(apart, by_hand(head(hidden), teacher(theirs), labels, 1.0, t))
        assert n == (labels != IGNORED).sum() == sums.metrics["label_loss"][1]
    assert teacher.weight.grad is None


@pytest.mark.parametrize("t", [1.0, 2.0])
def test_the_written_gradient_beside_a_teacher_is_autograds_and_unlabelled_tokens_have_none(t: float) -> None:
    torch.manual_seed(0)
    logits, soft = torch.randn(50, V, requires_grad=True), torch.randn(50, V).mul(3).softmax(-1)
    labels = torch.randint(0, V, (50,)).masked_fill(torch.arange(50) % 3 == 0, IGNORED)
    plain = token_losses(logits, labels, 0.1, 0.01, soft, 0.3, t)
    sums, _, found = losses_and_gradient(logits.detach().clone(), labels, 0.1, 0.01, soft=soft, weight=0.3, temperature=t)
    near(sums.total, plain.total)
    near(found, *torch.autograd.grad(plain.total, logits))
    assert not found[labels == IGNORED].any()


@pytest.mark.parametrize("width", [V - 5, V + 5])
def test_of_embeddings_with_other_numbers_of_rows_only_common_ones_are_told(width: int) -> None:
    """Rows behind the tokenizer's tokens, such as those that make the number a multiple of 64."""
    teacher, hidden = head_of(24, width), torch.randn(6, 24)
    soft = SoftTargets(hidden, teacher, 1.0).probabilities(slice(0, 6), V)
    near(soft.sum(-1), torch.ones(6))
    near(soft[:, : V - 5].log().diff(), teacher(hidden)[:, : V - 5].diff())
    assert soft.shape == (6, V) and not soft[:, width:].any() and not soft.requires_grad


def test_a_model_that_says_what_its_teacher_says_has_nothing_to_learn() -> None:
    head, hidden = head_of(16), torch.randn(20, 16, requires_grad=True)
    loss = chunked_loss(hidden, torch.randint(0, V, (20,)), head, teacher=SoftTargets(hidden.detach(), head, 1.0))
    gradient, *_ = torch.autograd.grad(loss.total, hidden)
    assert loss.total.detach().abs() < 1e-4 and gradient.abs().max() < 1e-5 and loss.nll > 1
