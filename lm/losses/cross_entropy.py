"""Cross-entropy of given logits, and what a teacher adds to it, as sums over label tokens."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.teacher import divergence, divergence_gradient
from lm.nn.batch import IGNORED
from lm.ops.ranks.vocabulary import Vocabulary

ALL = Vocabulary()


@dataclass
class LossSums:
    """Sums over label tokens: `total` is minimised (smoothing, z-loss and auxiliary losses included), `nll` is reported, in nats."""

    total: Tensor
    nll: Tensor
    loads: Tensor | None = None  # (MoE layers, e), tokens per expert of this forward; None where there are no experts
    metrics: dict[str, Tensor] = field(default_factory=dict)  # what else is reported, by name: (2,), as of `mean_of`
    counts: Tensor | None = None  # sums over labels, from which the `figures` of a `Measure` follow; None: it has none
    auxiliary: dict[str, Tensor] = field(default_factory=dict)  # the parts of `total` that layers add, by name


def mean_of(total: Tensor, n: int) -> Tensor:
    """(2,) a sum, and how many numbers are in it: float32, so that counts are exact in a run whose default dtype is bf16."""
    return torch.stack([total.float(), torch.full_like(total, n, dtype=torch.float32)])


def with_error(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the metrics with how often it is wrong, 1 - accuracy, where that is told."""
    if "accuracy" not in metrics:
        return metrics
    right, n = metrics["accuracy"]
    return metrics | {"error": torch.stack([n - right, n])}


def answered(logs: Tensor, answers: Tensor, of: Vocabulary = ALL) -> Tensor:
    """(3,) nats of the answers, how many of them are the likeliest token, and how many there are.  logs: (n, v) log p over the entries
    of `of`, answers: (n,)."""
    at, here = of.places(answers)
    nats = -of.summed(logs.gather(-1, at) * here)
    each = torch.cat([nats, (of.likeliest(logs) == answers).unsqueeze(-1), (answers != IGNORED).unsqueeze(-1)], -1)
    return of.own(each).sum(0).detach()


def token_losses(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft: Tensor | None = None,
    weight: float = 0.0,
    temperature: float = 1.0,
    beta: float = 0.0,
    shares: Tensor | None = None,
) -> LossSums:
    """logits: (n, v), labels: (n,) with IGNORED where nothing is predicted; computed in float32.  soft: (n, v) probabilities of a teacher
    at the temperature, whose part of the loss is `weight`, in place of the labels'.  beta: as in `divergence`.  shares: (n,) what each
    label counts in all sums; None: 1."""
    logits, there = logits.float(), labels != IGNORED
    counted = there if shares is None else there * shares
    total = _entropy(logits, labels, label_smoothing, shares)
    nll = _entropy(logits.detach(), labels, 0.0, shares) if label_smoothing else total.detach()
    if soft is not None:
        apart = (divergence(soft, (logits / temperature).log_softmax(-1), beta) * counted).sum()
        total = (1 - weight) * total + weight * temperature**2 * apart
    if z_loss:
        total = total + z_loss * (logits.logsumexp(-1).square() * counted).sum()
    return LossSums(total, nll)


def _entropy(logits: Tensor, labels: Tensor, label_smoothing: float, shares: Tensor | None) -> Tensor:
    if shares is None:
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    return (F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing) * shares).sum()


def losses_and_gradient(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    of: Vocabulary = ALL,
    answers: Tensor | None = None,
    soft: Tensor | None = None,
    weight: float = 0.0,
    temperature: float = 1.0,
    beta: float = 0.0,
    shares: Tensor | None = None,
) -> tuple[LossSums, Tensor | None, Tensor]:
    """Returns `token_losses`, the figures of `answered`, and the gradient of `total` by the logits: softmax - target, written over the
    log-softmax, where autograd would fill one more tensor of this size with zeros and read three.

    With a z-loss of weight z, a row's softmax is multiplied by 1 + 2 z log Z.  logits: (n, v) in float32 or wider, which are lost; of: the
    vocabulary of the logits; where that is a slice, logits and labels are those of all ranks' tokens, and the sums are over this rank's.
    shares: (n,) what each label counts in all sums; None: 1.
    """
    log_z = of.log_z(logits) if z_loss else None
    alike = soft is None or (temperature == 1 and beta == 0)  # both parts of the gradient have the same softmax
    warm = None if soft is None or temperature == 1 else (logits / temperature).log_softmax(-1)
    logs = of.log_softmax_(logits)
    pull = None if soft is None or alike else divergence_gradient(soft, logs if warm is None else warm, beta)
    answer_sums = None if answers is None else answered(logs, answers, of)
    counted = (labels != IGNORED).float().unsqueeze(-1)  # (n,) -> (n, 1)
    at, here = of.places(labels)
    if shares is not None:
        counted, here = counted * shares.unsqueeze(-1), here * shares.unsqueeze(-1)
    nll = -of.own(of.summed(logs.gather(-1, at) * here)).sum()
    total, uniform, share = nll, label_smoothing / of.size(logs), counted if alike else (1 - weight) * counted
    if label_smoothing:
        total = (1 - label_smoothing) * nll - uniform * of.own(of.summed(logs.sum(-1, keepdim=True)) * counted).sum()
    beside = {}
    if soft is not None:
        apart = temperature**2 * (divergence(soft, logs if warm is None else warm, beta) * counted.squeeze(-1)).sum()
        total, beside = (1 - weight) * total + weight * apart, {"teacher_kl": torch.stack([apart, counted.sum()])}
    if log_z is not None:
        total = total + z_loss * of.own(log_z.square() * counted).sum()
        share = share + 2 * z_loss * log_z * counted
    gradient = logs.exp_().mul_(share)
    gradient.scatter_(-1, at, gradient.gather(-1, at) - (1 - weight) * (1 - label_smoothing) * here)
    if label_smoothing:
        gradient.sub_((1 - weight) * uniform * counted)
    if pull is not None:
        gradient.add_(weight * temperature * counted * pull)
    elif soft is not None:
        gradient.sub_(weight * counted * soft)
    return LossSums(total, nll, metrics=beside), answer_sums, gradient
