"""Losses of numbers that a head tells of each text, which are measured by themselves."""

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.auxiliary import Auxiliary
from lm.losses.cross_entropy import LossSums, mean_of, with_error
from lm.losses.likelihoods import label_logits
from lm.losses.measure import Measure, macro_f1
from lm.nn.batch import IGNORED, Batch
from lm.nn.context import Context
from lm.nn.head import Head, Reader
from lm.nn.transformer import LM
from lm.ops.precision import widest


class TargetLoss(Measure):
    """The mean over labels of a loss of each number, summed over texts: transformers' loss, times the texts."""

    of_text = False

    @abstractmethod
    def each(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(n, k) the loss of each logit."""

    @abstractmethod
    def metrics(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Returns further figures, each `mean_of` the texts."""

    @abstractmethod
    def counts(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns sums over texts, from which `figures` follow."""

    @abstractmethod
    def guessed(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(n,), (n,): the probability of what is the likeliest of a text, and whether it is right; NaN where none is told."""

    def reader(self, batch: Batch) -> Reader:
        labels, targets = self.labels(batch), given(batch)
        read = label_logits(labels, batch.n_labels(labels))

        def sums(hidden: Tensor, head: Head, ctx: Context) -> LossSums:
            return Auxiliary.of(ctx.reported, (labels != IGNORED).sum(-1)).beside(self._sums(read(hidden, head, ctx), targets))

        return sums

    def closely(self, model: LM, batch: Batch) -> tuple[LossSums, Tensor]:
        labels, targets = self.labels(batch), given(batch)
        logits: Tensor = model(batch, read=label_logits(labels, batch.n_labels(labels)))
        return self._sums(logits, targets), torch.stack([self.each(logits, targets).mean(-1), *self.guessed(logits, targets)], -1)

    def _sums(self, logits: Tensor, targets: Tensor) -> LossSums:
        total, seen = self.each(logits, targets).mean(-1).sum(), logits.detach()
        wide = widest(seen.device)
        counts = self.counts(seen.to(wide), targets.to(wide))
        return LossSums(total, total.detach(), metrics=self.metrics(seen, targets), counts=counts)


class SquaredError(TargetLoss):
    """(logit - target)^2."""

    less = ("mae",)
    units = {"loss": "squared error", "mae": "absolute error"}

    def each(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (logits - targets).square()

    def metrics(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"mae": mean_of((logits - targets).abs().sum(), targets.numel())}

    def counts(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(6,): how many, and the sums of guesses, numbers, their squares and products."""
        guess, number = logits.flatten(), targets.flatten()
        return torch.stack([each.sum() for each in (guess**0, guess, number, guess**2, number**2, guess * number)])

    def figures(self, counts: Tensor) -> dict[str, float]:
        """Pearson's correlation, 0 where either are all the same."""
        n, guess, number, guesses, numbers, both = counts.tolist()
        guessed, given = guesses - guess**2 / n, numbers - number**2 / n
        spread = guessed > _ROUNDING * guesses and given > _ROUNDING * numbers
        return {"pearson": (both - guess * number / n) / (guessed * given) ** 0.5 if spread else 0.0}

    def guessed(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        none = torch.full_like(logits[:, 0], torch.nan)
        return none, none


_ROUNDING = 1e-12  # part of a sum of squares that float64 may lose: no more is left of the spread of equal numbers


class BinaryCrossEntropy(TargetLoss):
    """-log sigmoid(logit) where a label is right, and -log sigmoid(-logit) where it is not."""

    less = ("ece", "error")
    units = {"loss": "nats/label"}

    def each(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")

    def metrics(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """How often all labels of a text are told rightly, and how often not."""
        right, n = self.guessed(logits, targets)[1].sum(), len(targets)
        return with_error({"accuracy": mean_of(right, n)})

    def counts(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(k, 3): how often each label was guessed rightly, guessed and given."""
        guessed = (logits > 0).to(targets.dtype)
        return torch.stack([(guessed * targets).sum(0), guessed.sum(0), targets.sum(0)], -1)

    def figures(self, counts: Tensor) -> dict[str, float]:
        return {"macro_f1": macro_f1(counts), "micro_f1": macro_f1(counts.sum(0, keepdim=True))}

    def guessed(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of all labels together, each told by itself."""
        return F.logsigmoid(logits.abs()).sum(-1).exp(), ((logits > 0) == (targets > 0)).all(-1).to(logits.dtype)


def given(batch: Batch) -> Tensor:
    """(n, k) the targets of the n labels of a batch, row by row."""
    assert batch.labels is not None and batch.targets is not None
    n = (batch.labels != IGNORED).sum(-1, keepdim=True)
    return batch.targets[torch.arange(batch.targets.shape[1], device=n.device) < n]
