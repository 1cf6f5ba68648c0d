"""Loss and bits per byte of a model on rows of tokens."""

import math
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NotRequired, Protocol, Self, TypedDict, cast

import torch
from torch import Tensor

from lm.data.loader import eval_batches
from lm.data.order import Ids
from lm.data.rows.base import Rows
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.curves import Curves
from lm.generation.decode import eval_mode
from lm.generation.documents import Documents
from lm.losses.cross_entropy import LossSums
from lm.losses.measure import Measure
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM
from lm.schema import Tree


class Evaluation(TypedDict):
    """`bytes`: of the text that the predicted tokens stand for; estimated where the tokenizer is not byte-level. `val_ece`: the expected
    calibration error of the likeliest token, where it was evaluated closely. The further figures come from the objective's `Measure`: of
    chats the answers' loss, and how often an answer's token is the likeliest one; of pairs the pair loss (DPO's, say), the part of pairs
    that is ranked rightly, their margin, and the log-likelihood of a better and of a worse answer, in nats; of labels of texts
    what `balanced` returns of them, and F1 over all; of numbers their mean absolute error and Pearson's correlation."""

    val_loss: float  # nats per predicted token, or what the objective's `Measure` says
    val_bits_per_byte: NotRequired[float]  # of labels that are text
    tokens: int
    bytes: NotRequired[int]
    val_ece: NotRequired[float]
    val_label_loss: NotRequired[float]
    val_accuracy: NotRequired[float]
    val_error: NotRequired[float]
    val_macro_f1: NotRequired[float]
    val_mcc: NotRequired[float]
    val_micro_f1: NotRequired[float]
    val_mae: NotRequired[float]
    val_pearson: NotRequired[float]
    val_pair_loss: NotRequired[float]
    val_answer_loss: NotRequired[float]
    val_good_gain: NotRequired[float]
    val_bad_gain: NotRequired[float]
    val_margin: NotRequired[float]
    val_chosen_logp: NotRequired[float]
    val_rejected_logp: NotRequired[float]


@dataclass(frozen=True)
class Totals:
    """Sums over rows, so that parts add up.  metrics: by the name of a figure its sum, and over how many.  curves: None unless evaluated
    closely.  counts: as in LossSums, of which `measure` makes figures."""

    nats: float
    tokens: float
    n_bytes: float
    metrics: dict[str, tuple[float, float]]
    measure: Measure
    curves: Curves | None = None
    counts: Tensor | None = None

    def __add__(self, other: Self) -> Self:
        metrics = {name: (total + other.metrics[name][0], n + other.metrics[name][1]) for name, (total, n) in self.metrics.items()}
        curves = None if self.curves is None or other.curves is None else self.curves + other.curves
        counts = None if self.counts is None or other.counts is None else self.counts + other.counts
        sums = self.nats + other.nats, self.tokens + other.tokens, self.n_bytes + other.n_bytes
        return type(self)(*sums, metrics, self.measure, curves, counts)

    def figures(self) -> Evaluation:
        """Returns the means; of text also bits per byte = nats / ln 2 / bytes, so that tokenizers compare."""
        metrics = {f"val_{name}": total / n for name, (total, n) in self.metrics.items() if n}
        metrics |= {} if self.counts is None else {f"val_{name}": value for name, value in self.measure.figures(self.counts).items()}
        found: Tree = {"val_loss": self.nats / self.tokens}
        found |= {"val_bits_per_byte": self.nats / math.log(2) / self.n_bytes} if self.n_bytes else {}
        found |= {"tokens": int(self.tokens)} | ({"bytes": int(self.n_bytes)} if self.n_bytes else {})
        ece = None if self.curves is None else self.curves.ece()
        return cast(Evaluation, found | ({} if ece is None else {"val_ece": ece}) | metrics)


class EvalRanks(Protocol):
    """The processes that evaluate together, each a part of the rows (lm.training.launch.ranks)."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def total(self, *values: float) -> list[float]:
        """Returns each value summed over the processes."""


class OneRank:
    """One process, which evaluates all rows."""

    rank, world = 0, 1

    def total(self, *values: float) -> list[float]:
        return list(values)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model on rows, `micro_batch` of them at a time.

    measure: which labels count, and what is told beside their likelihood.  ranks: the processes that share the rows.
    """

    model: LM
    tokenizer: Tokenizer
    micro_batch: int
    measure: Measure = field(default_factory=Measure)
    ranks: EvalRanks = field(default_factory=OneRank)

    def totals(self, rows: Rows, ids: Ids, closely: bool = False, documents: Documents | None = None) -> Totals:
        """Returns the sums over the labels of the rows `ids`, all of which each process passes. Raises ConfigError where there is no label.

        closely: fills curves too, and `documents`, where given, with the rows of this process.
        """
        require_labels(rows, ids, self.tokenizer, self.micro_batch)
        mine = self._sums(rows, ids, Curves() if closely else None, documents)
        parts = [
            [mine.nats, mine.tokens, mine.n_bytes],
            [] if mine.counts is None else mine.counts.flatten().tolist(),
            [] if mine.curves is None else mine.curves.flat(),
            [number for pair in mine.metrics.values() for number in pair],
        ]
        summed = iter(self.ranks.total(*chain.from_iterable(parts)))
        (nats, tokens, n_bytes), counted, seen, paired = ([*islice(summed, len(part))] for part in parts)
        counts = None if mine.counts is None else torch.tensor(counted, dtype=torch.float64).view_as(mine.counts)
        curves = None if mine.curves is None else Curves.of_flat(seen)
        if rows.label_bytes(self.tokenizer) is None:
            n_bytes = round(rows.bytes_per_label * tokens)
        metrics = dict(zip(mine.metrics, zip(paired[0::2], paired[1::2], strict=True), strict=True))
        return Totals(nats, tokens, n_bytes, metrics, self.measure, curves, counts)

    def _sums(self, rows: Rows, ids: Ids, curves: Curves | None, documents: Documents | None) -> Totals:
        """Returns the sums over this process's part of the rows. A process with fewer batches than others makes up for them by forwards
        that do not count, since with sharded weights all processes must take part in each forward."""
        device, sizes = self.model.embed.weight.device, rows.label_bytes(self.tokenizer)
        mine = rows.by_width(ids)[self.ranks.rank :: self.ranks.world]
        idle = -(-len(ids[:: self.ranks.world]) // self.micro_batch) - -(-len(mine) // self.micro_batch)
        each: list[LossSums] = []
        tokens = n_bytes = 0
        with eval_mode(self.model):
            for at, batch in enumerate(eval_batches(rows, mine, self.micro_batch)):
                labels = self.measure.labels(batch)
                predicted = labels[labels != IGNORED].numpy()
                tokens += len(predicted)
                n_bytes += int(sizes[predicted].sum()) if sizes is not None else 0
                sums, guesses = self._seen(batch.to(device), curves)
                if guesses is not None and documents is not None:
                    documents.add(mine[at * self.micro_batch : (at + 1) * self.micro_batch], labels, guesses)
                each.append(sums)
            for _ in range(idle):
                sums, _ = self._seen(rows.batch(ids[:1]).to(device), Curves() if curves else None)
                none = None if sums.counts is None else sums.counts * 0
                each.append(LossSums(sums.total * 0, sums.nll * 0, None, {name: pair * 0 for name, pair in sums.metrics.items()}, none))
        metrics = {name: torch.stack([sums.metrics[name] for sums in each]).cpu().double().sum(0) for name in each[0].metrics}
        pairs = {name: (float(pair[0]), float(pair[1])) for name, pair in metrics.items()}
        nats = torch.stack([sums.nll for sums in each]).cpu().double().sum().item()
        counted = [sums.counts for sums in each if sums.counts is not None]
        counts = torch.stack(counted).cpu().double().sum(0) if counted else None
        return Totals(nats, tokens, n_bytes, pairs, self.measure, curves, counts)

    def _seen(self, batch: Batch, curves: Curves | None) -> tuple[LossSums, Tensor | None]:
        """Returns the sums of one forward; with `curves`, to which it is added, also what its labels were guessed to be."""
        if curves is None:
            return self.measure(self.model, batch), None
        sums, guesses = self.measure.closely(self.model, batch)
        curves.add(batch, self.measure.places(batch), guesses)
        return sums, guesses


def require_labels(rows: Rows, ids: Ids, tokenizer: Tokenizer, micro_batch: int) -> None:
    """Raises ConfigError where the rows `ids` have no label that stands for text; reads up to the first that does."""
    sizes = rows.label_bytes(tokenizer)
    for batch in eval_batches(rows, ids, micro_batch):
        assert batch.labels is not None
        predicted = batch.labels[batch.labels != IGNORED].numpy()
        if len(predicted) and (sizes is None or sizes[predicted].any()):
            return
    raise ConfigError(
        f"data: {len(ids)} rows have 0 tokens of text to predict, and at least one is needed. Give more text, or raise data.val_rows."
    )
