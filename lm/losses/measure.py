"""Measures of a model on labelled rows, and the figures that a loss over pairs of answers reports beside itself."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.cross_entropy import LossSums, mean_of, with_error
from lm.losses.kto import KTOLoss
from lm.losses.likelihoods import row_likelihoods, row_scores
from lm.losses.pairs import PairLoss
from lm.losses.rewards import bradley_terry, told_apart
from lm.losses.tokens import causal_reader
from lm.nn.bare import without_adapter
from lm.nn.batch import IGNORED, Batch
from lm.nn.context import Context
from lm.nn.head import CHUNK, Head, Reader
from lm.nn.transformer import LM

T = TypeVar("T")


class Measure:
    """The likelihood of a batch's labels. A subclass reports further figures, by names that are the same for every batch."""

    less: ClassVar[tuple[str, ...]] = ()
    """Names of what it tells more of which less is better, so that a study can compare by them."""
    of_text: ClassVar[bool] = True
    """Whether labels are text, so that their loss is told in bits per byte too."""
    learned: ClassVar[str] = "loss"
    """Its figure that is the loss of training, of rows held out."""
    units: Mapping[str, str] = {
        "loss": "nats/token", "bits_per_byte": "bits/byte", "label_loss": "nats/token of answers",
        "exposure": "nats/token", "own_entropy": "nats/token", "true_entropy": "nats/token",
    }  # fmt: skip
    """Of its figures, and of those that are told beside them."""

    def unit(self, metric: str) -> str:
        """Returns the unit of a metric: of test_loss/512 as of the figure `loss`, and of a step's own loss as of what is `learned`."""
        name = metric.partition("/")[0]
        figure = self.learned if name == "loss" else name.removeprefix("val_").removeprefix("test_")
        return self.units.get(figure, "no unit")

    def labels(self, batch: Batch) -> Tensor:
        """Returns the labels whose likelihood is measured."""
        assert batch.labels is not None
        return batch.labels

    def places(self, batch: Batch) -> Tensor:
        """Returns these labels in the shape of the batch, (b, s), at the places that predict them; IGNORED elsewhere."""
        return self.labels(batch)

    def reader(self, batch: Batch) -> Reader:
        """Returns the reader that computes the sums from hidden states."""
        labels = self.labels(batch)
        return causal_reader(labels, n_labels=batch.n_labels(labels), shares=batch.shares)

    def figures(self, counts: Tensor) -> dict[str, float]:
        """Returns further figures of the `counts` of all batches together, which are no means over labels."""
        return {}

    def __call__(self, model: LM, batch: Batch) -> LossSums:
        """Returns sums over `labels`."""
        sums: LossSums = model(batch, read=self.reader(batch))
        return sums

    def closely(self, model: LM, batch: Batch) -> tuple[LossSums, Tensor]:
        """Returns the sums, and the figures of `guesses` for each of the labels, (n, 3), from one forward."""
        read, look = self.reader(batch), guesses(self.places(batch), batch.shares)

        def both(hidden: Tensor, head: Head, ctx: Context) -> tuple[LossSums, Tensor]:
            return read(hidden, head, ctx), look(hidden, head, ctx)

        found: tuple[LossSums, Tensor] = model(batch, read=both)
        return found


class Answers(Measure):
    """Reports loss and accuracy over answers too, where not all labels are answers."""

    less: ClassVar[tuple[str, ...]] = ("label_loss",)

    def reader(self, batch: Batch) -> Reader:
        labels = self.labels(batch)
        return causal_reader(labels, answers=answers(batch), n_labels=batch.n_labels(labels), shares=batch.shares)


class Choices(Answers):
    """Reports how often another label than the right one is the likeliest, too: less of it is better, by which studies compare; and counts
    of each label, from which `balanced` follows."""

    less = (*Answers.less, "ece", "error")
    of_text = False
    units = {"loss": "nats/label", "label_loss": "nats/label"}

    def figures(self, counts: Tensor) -> dict[str, float]:
        return balanced(counts)

    def reader(self, batch: Batch) -> Reader:
        sums, labels = super().reader(batch), self.labels(batch)

        def read(hidden: Tensor, head: Head, ctx: Context) -> LossSums:
            found: LossSums = sums(hidden, head, ctx)
            logits = head(hidden)[labels != IGNORED].float()  # (n, labels); ranks that share a head read equally many places
            guessed, given = (F.one_hot(each, logits.shape[-1]) for each in (logits.log_softmax(-1).argmax(-1), labels[labels != IGNORED]))
            counts = torch.stack([(guessed * given).sum(0), guessed.sum(0), given.sum(0)], -1)
            return replace(found, metrics=with_error(found.metrics), counts=counts)

        return read


def balanced(counts: Tensor) -> dict[str, float]:
    """Returns figures in which rare labels count: `macro_f1`, and the correlation of guesses with labels (Gorodkin 2004, eq. 8), 0 where
    either are all the same.  counts: as in `macro_f1`."""
    right, guessed, given = counts.double().unbind(-1)
    n = given.sum()
    spread = ((n**2 - guessed.square().sum()) * (n**2 - given.square().sum())).sqrt()
    mcc = (right.sum() * n - guessed @ given) / spread if spread > 0 else spread
    return {"macro_f1": macro_f1(counts), "mcc": float(mcc)}


def macro_f1(counts: Tensor) -> float:
    """Returns the mean over labels that were guessed or given of F1 = 2 right / (guessed + given); 0 where none was.  counts: (labels, 3),
    how often each was guessed rightly, guessed and given."""
    right, guessed, given = counts.double().unbind(-1)
    there = guessed + given > 0
    return float((2 * right[there] / (guessed + given)[there]).mean()) if there.any() else 0.0


class Reference:
    """The frozen model that a loss compares with. It is loaded at its first use, where the batch is."""

    def __init__(self, load: Callable[[], LM]) -> None:
        self._load = load
        self._model: LM | None = None

    @torch.no_grad()
    def __call__(self, batch: Batch, read: Callable[[Tensor, Head, Context], T]) -> T:
        """Returns what `read` makes of the batch, with no gradient."""
        if self._model is None:
            model, device = self._load(), batch.tokens.device
            self._model = model if model.embed.weight.device == device else model.to(device)  # one in slices is there, and cannot be moved
        found: T = self._model(batch, read=read)
        return found


class Start:
    """The model as training started from it, with which a loss compares."""

    def __init__(self, load: Callable[[], LM] | None) -> None:
        """load: returns it, for a copy of its own. None: it is the trained model without its adapter, which is all that is trained."""
        self._copy = None if load is None else Reference(load)

    @torch.no_grad()
    def __call__(self, model: LM, batch: Batch, read: Callable[[Tensor, Head, Context], T]) -> T:
        """Returns what `read` makes of the batch, with no gradient.  model: the one that is trained, or examined."""
        if self._copy is not None:
            return self._copy(batch, read)
        with without_adapter(model):
            found: T = model(batch, read=read)
            return found


class OfPairs(Measure):
    """Of rows that come in pairs, the better answer first, whose labels are the ones that count."""

    def labels(self, batch: Batch) -> Tensor:
        return super().labels(batch)[0::2]

    def places(self, batch: Batch) -> Tensor:
        better = super().labels(batch).clone()
        better[1::2] = IGNORED
        return better


class _Likelihoods(Measure):
    """What makes its sums of likelihoods of whole answers, and so takes a forward more to look at each label."""

    def closely(self, model: LM, batch: Batch) -> tuple[LossSums, Tensor]:
        found: Tensor = model(batch, read=guesses(self.places(batch)))
        return self(model, batch), found


class Pairs(_Likelihoods, OfPairs):
    """The likelihood of the better answers, and how the two of each pair compare.

    loss: that of training.  start: where the loss needs it and it is None, only likelihoods are reported.
    """

    less = ("pair_loss", "error")
    learned = "pair_loss"

    def __init__(self, loss: PairLoss, start: Start | None) -> None:
        self.units = {**Measure.units, "pair_loss": loss.unit, "chosen_logp": "nats/answer", "rejected_logp": "nats/answer"}
        self._loss, self._start = loss, start if loss.needs_start else None

    def __call__(self, model: LM, batch: Batch) -> LossSums:
        labels = batch.labels
        assert labels is not None
        reader = row_likelihoods(labels, n=batch.n_labels(labels))
        before = self._start(model, batch, reader) if self._start is not None else None
        after: Tensor = model(batch, read=reader)
        sums = self._loss(after, before, (labels != IGNORED).sum(-1))
        metrics = with_error(sums.metrics) | ({"pair_loss": mean_of(sums.nll, len(after) // 2)} if "margin" in sums.metrics else {})
        nats = -after[0::2].sum()
        return LossSums(nats, nats, metrics=metrics)


class Rated(_Likelihoods):
    """The likelihood of all answers, and how much more likely the model has made good ones and bad ones. The loss is told with a reference
    point of 0, so that it is a sum over rows.  start: as in `Pairs`."""

    less = ("answer_loss", "error")
    learned = "answer_loss"
    units = {**Measure.units, "answer_loss": "per answer", "good_gain": "nats/answer", "bad_gain": "nats/answer"}

    def __init__(self, loss: KTOLoss, start: Start | None) -> None:
        self._loss, self._start = loss, start

    def __call__(self, model: LM, batch: Batch) -> LossSums:
        labels = self.labels(batch)
        assert batch.answers is not None
        reader = row_likelihoods(labels, n=batch.n_labels(labels))
        after: Tensor = model(batch, read=reader)
        nats = -after.sum()
        if self._start is None:
            return LossSums(nats, nats)
        sums = self._loss(after - self._start(model, batch, reader), (batch.answers != IGNORED).any(-1), after.new_zeros(()))
        return LossSums(nats, nats, metrics=with_error(sums.metrics) | {"answer_loss": mean_of(sums.nll, len(after))})


class Rewards(OfPairs):
    """How the rewards of the two answers of each pair compare."""

    less = ("ece", "error")
    of_text = False
    units = {"loss": "nats/pair"}

    def __call__(self, model: LM, batch: Batch) -> LossSums:
        return bradley_terry(self._told(model, batch))

    def closely(self, model: LM, batch: Batch) -> tuple[LossSums, Tensor]:
        rewards = self._told(model, batch)
        return bradley_terry(rewards), told_apart(rewards)

    def _told(self, model: LM, batch: Batch) -> Tensor:
        assert batch.labels is not None
        rewards: Tensor = model(batch, read=row_scores(batch.labels))
        return rewards


def answers(batch: Batch) -> Tensor | None:
    """Returns the labels that are answers: all, unless the batch says which."""
    return batch.labels if batch.answers is None else batch.answers


def guesses(labels: Tensor, shares: Tensor | None = None) -> Reader:
    """A reader: (n, 3) for each label that is not IGNORED, row by row: its nats, the probability of the likeliest token, and whether the
    label is that token. Logits exist only chunk by chunk.  shares: (b, s) what each label counts; the nats are multiplied by it, and where
    it is 0 nothing is guessed: NaN."""

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        wanted, places = labels[labels != IGNORED], hidden[labels != IGNORED]  # (n,), (n, d)
        parts = zip(places.split(CHUNK), wanted.split(CHUNK), strict=True)
        found = torch.cat([_guessed(head(place).float(), label) for place, label in parts])
        if shares is None:
            return found
        share = shares[labels != IGNORED].unsqueeze(-1)
        return torch.cat([found[:, :1] * share, found[:, 1:].masked_fill(share == 0, torch.nan)], -1)

    return read


def _guessed(logits: Tensor, labels: Tensor) -> Tensor:
    likeliest = logits.log_softmax(-1).max(-1)
    nats = F.cross_entropy(logits, labels, reduction="none")
    return torch.stack([nats, likeliest.values.exp(), (likeliest.indices == labels).float()], -1)
