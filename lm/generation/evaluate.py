"""Loss and bits per byte of a model on rows of tokens."""

import math
from typing import Protocol, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from lm.data.loader import eval_batches
from lm.data.rows.base import Rows
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED
from lm.nn.head import last_position
from lm.nn.loss import LossSums, causal_reader
from lm.nn.transformer import LM


class Evaluation(TypedDict):
    """`bytes`: of text that the predicted tokens stand for; estimated where the tokenizer is not byte-level."""

    val_loss: float  # nats per predicted token
    val_bits_per_byte: float
    tokens: int
    bytes: int


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


def evaluate(
    model: LM, rows: Rows, ids: NDArray[np.int64], tokenizer: Tokenizer, micro_batch: int, among: Sharers | None = None
) -> Evaluation:
    """Of the labels of the rows `ids`. Raises ConfigError where there is none.

    Bits per byte = nats / ln 2 / bytes, so that tokenizers compare.  among: each process passes all ids.
    """
    among = among or _Alone()
    require_labels(rows, ids, tokenizer, micro_batch)
    nats, tokens, n_bytes = among.total(*_sums(model, rows, ids, tokenizer, micro_batch, among))
    if tokenizer.token_bytes() is None and tokens:
        n_bytes = round(rows.bytes_per_label * tokens)
    return Evaluation(val_loss=nats / tokens, val_bits_per_byte=nats / math.log(2) / n_bytes, tokens=int(tokens), bytes=int(n_bytes))


def require_labels(rows: Rows, ids: NDArray[np.int64], tokenizer: Tokenizer, micro_batch: int) -> None:
    """Raises ConfigError where nothing is predicted in the rows `ids`, or no text: reads up to the first label that has some."""
    sizes = tokenizer.token_bytes()
    for batch in eval_batches(rows, ids, micro_batch):
        assert batch.labels is not None
        predicted = batch.labels[batch.labels != IGNORED].numpy()
        if len(predicted) and (sizes is None or sizes[predicted].any()):
            return
    raise ConfigError(
        f"data: {len(ids)} held-out rows have no text to predict, and some is needed. Give more text, or raise data.val_rows."
    )


def _sums(
    model: LM, rows: Rows, ids: NDArray[np.int64], tokenizer: Tokenizer, micro_batch: int, among: Sharers
) -> tuple[float, float, float]:
    """Nats, tokens and bytes of this process's part. One with fewer batches than the others goes through some that do not count, since
    where weights are in slices all must come to each forward."""
    device = model.embed.weight.device
    sizes = tokenizer.token_bytes()
    mine = ids[among.rank :: among.world]
    idle = -(-len(ids[:: among.world]) // micro_batch) - -(-len(mine) // micro_batch)
    losses = [torch.zeros((), device=device)]
    tokens = n_bytes = 0
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in eval_batches(rows, mine, micro_batch):
                assert batch.labels is not None
                predicted = batch.labels[batch.labels != IGNORED].numpy()
                tokens += len(predicted)
                n_bytes += int(sizes[predicted].sum()) if sizes is not None else 0
                moved = batch.to(device)
                assert moved.labels is not None
                sums: LossSums = model(moved, loss=causal_reader(moved.labels))
                losses.append(sums.nll)
            for _ in range(idle):
                model(rows.batch(ids[:1]).to(device), loss=last_position)
    finally:
        model.train(was_training)
    return torch.stack(losses).double().sum().item(), tokens, n_bytes
