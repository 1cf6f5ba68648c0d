"""Loss and bits per byte of a model on rows of tokens."""

import math
from dataclasses import dataclass
from typing import NotRequired, Protocol, Self, TypedDict, cast

import numpy as np
import torch
from numpy.typing import NDArray

from lm.data.loader import eval_batches
from lm.data.rows.base import Rows
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED
from lm.nn.loss import LossSums
from lm.nn.measure import Measure
from lm.nn.transformer import LM
from lm.schema import Tree


class Evaluation(TypedDict):
    """`bytes`: of text that the predicted tokens stand for; estimated where the tokenizer is not byte-level. The others are what a measure
    tells: of chats the answers' loss and the part of their tokens that is the likeliest; of pairs DPO's loss, the part that is the right
    way round and by how much, and the log-likelihood of a better and of a worse answer, in nats."""

    val_loss: float  # nats per predicted token
    val_bits_per_byte: float
    tokens: int
    bytes: int
    val_label_loss: NotRequired[float]
    val_accuracy: NotRequired[float]
    val_pair_loss: NotRequired[float]
    val_margin: NotRequired[float]
    val_chosen_logp: NotRequired[float]
    val_rejected_logp: NotRequired[float]


@dataclass(frozen=True)
class Totals:
    """Sums over rows, so that parts add up.  told: by name a sum, and how many are in it."""

    nats: float
    tokens: float
    n_bytes: float
    told: dict[str, tuple[float, float]]

    def __add__(self, other: Self) -> Self:
        told = {name: (total + other.told[name][0], n + other.told[name][1]) for name, (total, n) in self.told.items()}
        return type(self)(self.nats + other.nats, self.tokens + other.tokens, self.n_bytes + other.n_bytes, told)

    def figures(self) -> Evaluation:
        """Means; bits per byte = nats / ln 2 / bytes, so that tokenizers compare."""
        bits = self.nats / math.log(2) / self.n_bytes
        told = {f"val_{name}": total / n for name, (total, n) in self.told.items() if n}
        found: Tree = {
            "val_loss": self.nats / self.tokens,
            "val_bits_per_byte": bits,
            "tokens": int(self.tokens),
            "bytes": int(self.n_bytes),
        }
        return cast(Evaluation, found | told)


class Sharers(Protocol):
    """The processes that evaluate together, each a part of the rows (lm.training.launch.ranks)."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def total(self, *values: float) -> list[float]:
        """Each value summed over the processes."""


class _Alone:
    rank, world = 0, 1

    def total(self, *values: float) -> list[float]:
        return list(values)


def totals(
    model: LM,
    rows: Rows,
    ids: NDArray[np.int64],
    tokenizer: Tokenizer,
    micro_batch: int,
    among: Sharers | None = None,
    measure: Measure | None = None,
) -> Totals:
    """Of the labels of the rows `ids`. Raises ConfigError where there is none.

    among: each process passes all ids.  measure: what is told beside the likelihood of labels.
    """
    among = among or _Alone()
    require_labels(rows, ids, tokenizer, micro_batch)
    mine = _sums(model, rows, ids, tokenizer, micro_batch, measure or Measure(), among)
    flat = [number for pair in mine.told.values() for number in pair]
    nats, tokens, n_bytes, *told = among.total(mine.nats, mine.tokens, mine.n_bytes, *flat)
    if tokenizer.token_bytes() is None:
        n_bytes = round(rows.bytes_per_label * tokens)
    return Totals(nats, tokens, n_bytes, dict(zip(mine.told, zip(told[0::2], told[1::2], strict=True), strict=True)))


def require_labels(rows: Rows, ids: NDArray[np.int64], tokenizer: Tokenizer, micro_batch: int) -> None:
    """Raises ConfigError where nothing is predicted in the rows `ids`, or no text: reads up to the first label that has some."""
    sizes = tokenizer.token_bytes()
    for batch in eval_batches(rows, ids, micro_batch):
        assert batch.labels is not None
        predicted = batch.labels[batch.labels != IGNORED].numpy()
        if len(predicted) and (sizes is None or sizes[predicted].any()):
            return
    raise ConfigError(
        f"data: {len(ids)} rows have 0 tokens of text to predict, and at least one is needed. Give more text, or raise data.val_rows."
    )


def _sums(
    model: LM, rows: Rows, ids: NDArray[np.int64], tokenizer: Tokenizer, micro_batch: int, measure: Measure, among: Sharers
) -> Totals:
    """Of this process's part. One with fewer batches than the others goes through some that do not count, since where weights are in
    slices all must come to each forward."""
    device = model.embed.weight.device
    sizes = tokenizer.token_bytes()
    mine = ids[among.rank :: among.world]
    idle = -(-len(ids[:: among.world]) // micro_batch) - -(-len(mine) // micro_batch)
    each: list[LossSums] = []
    tokens = n_bytes = 0
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in eval_batches(rows, mine, micro_batch):
                labels = measure.labels(batch)
                predicted = labels[labels != IGNORED].numpy()
                tokens += len(predicted)
                n_bytes += int(sizes[predicted].sum()) if sizes is not None else 0
                each.append(measure(model, batch.to(device)))
            for _ in range(idle):
                sums = measure(model, rows.batch(ids[:1]).to(device))
                each.append(LossSums(sums.total * 0, sums.nll * 0, None, {name: pair * 0 for name, pair in sums.told.items()}))
    finally:
        model.train(was_training)
    told = {name: torch.stack([sums.told[name] for sums in each]).double().sum(0) for name in each[0].told}
    pairs = {name: (float(pair[0]), float(pair[1])) for name, pair in told.items()}
    return Totals(torch.stack([sums.nll for sums in each]).double().sum().item(), tokens, n_bytes, pairs)
