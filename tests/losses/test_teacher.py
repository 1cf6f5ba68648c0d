"""The divergence from a teacher, against torch's own, and its gradient in chunks against autograd's."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.cross_entropy import losses_and_gradient, token_losses
from lm.losses.teacher import SoftTargets, divergence, divergence_gradient
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


def same(found: Tensor, expected: Tensor) -> None:
    """Of float64 throughout, but for roundings of 1e-16 of numbers that are up to a thousand times as large, as with a beta of 1e-3."""
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12 * float(expected.detach().abs().max()))


BETAS = (0.0, 1e-3, 0.3, 0.5, 0.9, 1.0)


def by_kl_div(logits: Tensor, theirs: Tensor, beta: float) -> Tensor:
    """(n,) by torch's kl_div, whose arguments are (log q, log p) of KL(p || q), and the definition of Agarwal et al. 2023, equation 1."""
    q, p = logits.log_softmax(-1), theirs.log_softmax(-1)

    def kl(of: Tensor, to: Tensor) -> Tensor:
        return F.kl_div(to, of, reduction="none", log_target=True).sum(-1)

    if beta in (0.0, 1.0):
        return kl(p, q) if beta == 0 else kl(q, p)
    mixed = (beta * p.exp() + (1 - beta) * q.exp()).log()
    return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("t", [1.0, 2.5])
def test_each_divergence_and_its_written_gradient_are_those_of_kl_div_in_float64(beta: float, t: float) -> None:
    """Beside labels, smoothing and a z-loss. Seen to fail without the sum over q g, with 1 - beta left out, and with beta for 1 - beta."""
    torch.manual_seed(0)
    logits, theirs = (3 * torch.randn(40, V, dtype=torch.float64) for _ in range(2))
    labels, shares = torch.randint(0, V, (40,)).masked_fill(torch.arange(40) % 3 == 0, IGNORED), torch.rand(40, dtype=torch.float64)
    soft, at = (theirs / t).softmax(-1), labels != IGNORED
    same(divergence(soft, (logits / t).log_softmax(-1), beta), by_kl_div(logits / t, theirs / t, beta))
    leaf = logits.clone().requires_grad_()
    each = F.cross_entropy(leaf, labels, ignore_index=IGNORED, label_smoothing=0.1, reduction="none")
    each = 0.7 * each + 0.3 * t * t * by_kl_div(leaf / t, theirs / t, beta) + 0.01 * leaf.logsumexp(-1).square()
    wanted = (each * at * shares).sum()
    given = (logits.clone(), labels, 0.1, 0.01)
    sums, _, found = losses_and_gradient(*given, soft=soft, weight=0.3, temperature=t, beta=beta, shares=shares)
    same(sums.total, wanted)
    same(found, *torch.autograd.grad(wanted, leaf))
    same(sums.nll, (F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none") * shares).sum())
    assert sums.metrics["teacher_kl"][1] == pytest.approx(float((shares * at).sum()))


@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_of_a_divergence_is_that_of_differences(beta: float) -> None:
    torch.manual_seed(0)
    logits, soft = torch.randn(3, 7, dtype=torch.float64, requires_grad=True), torch.randn(3, 7, dtype=torch.float64).softmax(-1)
    assert torch.autograd.gradcheck(lambda x: divergence(soft, x.log_softmax(-1), beta), logits)
    total = divergence(soft, logits.log_softmax(-1), beta).sum()
    same(divergence_gradient(soft, logits.detach().log_softmax(-1), beta), *torch.autograd.grad(total, logits))


@pytest.mark.parametrize("beta", BETAS)
def test_what_a_teacher_gives_nothing_is_learned_to_be_nothing_by_each_divergence(beta: float) -> None:
    """Rows of the embedding behind the tokenizer's tokens, and tokens whose probability is below the smallest number, of both models.
    Seen to fail: log 0 of the teacher, and of the mixture, is infinite, and 0 times that is no number."""
    torch.manual_seed(0)
    logits, theirs = torch.randn(20, V), torch.randn(20, V)
    logits[:, 3], theirs[:, 3:6], logits[:, 7] = -300.0, -400.0, -300.0
    soft = F.pad(theirs[:, : V - 5].softmax(-1), (0, 5))
    logs = logits.log_softmax(-1)
    found = divergence_gradient(soft, logs, beta)
    assert torch.isfinite(found).all() and torch.isfinite(divergence(soft, logs, beta)).all()
    assert found.sum(-1).abs().max() < 1e-5
    assert (found[:, V - 5 :] > 0).all() and (found[:, 4:6] > 0).all() and not found[:, 3].any()


@pytest.mark.parametrize("beta", BETAS)
def test_a_chunked_loss_by_each_divergence_counts_each_token_by_its_share(beta: float) -> None:
    """Each token's loss alone, times its share."""
    head, teacher = head_of(16), head_of(24, seed=1)
    hidden, theirs = torch.randn(50, 16, requires_grad=True), 4 * torch.randn(50, 24)
    labels, shares = torch.randint(0, V, (50,)).masked_fill(torch.rand(50) < 0.3, IGNORED), torch.rand(50)
    soft, logits = (teacher(theirs) / 2).softmax(-1).detach(), head(hidden)
    each = [token_losses(logits[[i]], labels[[i]], soft=soft[[i]], weight=0.6, temperature=2.0, beta=beta) for i in range(50)]
    total = sum(share * one.total for share, one in zip(shares, each, strict=True))
    nll = sum(share * one.nll for share, one in zip(shares, each, strict=True))
    wanted = torch.autograd.grad(total, (hidden, head.weight))
    for chunk in (7, 1000):
        sums = chunked_loss(hidden, labels, head, chunk=chunk, teacher=SoftTargets(theirs, teacher, 0.6, 2.0, beta), shares=shares)
        near(sums.total, total)
        near(sums.nll, nll)
        for found, right in zip(torch.autograd.grad(sums.total, (hidden, head.weight)), wanted, strict=True):
            near(found, right)
        near(sums.metrics["teacher_kl"][1], shares[labels != IGNORED].sum())


@pytest.mark.parametrize("beta", BETAS)
def test_a_model_that_says_what_its_teacher_says_has_nothing_to_learn_by_any_divergence(beta: float) -> None:
    head, hidden = head_of(16), torch.randn(20, 16, requires_grad=True)
    loss = chunked_loss(hidden, torch.randint(0, V, (20,)), head, teacher=SoftTargets(hidden.detach(), head, 1.0, 2.0, beta))
    gradient, *_ = torch.autograd.grad(loss.total, hidden)
    assert loss.total.detach().abs() < 1e-4 and gradient.abs().max() < 1e-5
