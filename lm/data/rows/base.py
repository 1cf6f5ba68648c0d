"""What the rows of every objective offer."""

from typing import Protocol

import numpy as np

from lm.data.order import Ids
from lm.nn.batch import Batch


class Rows(Protocol):
    """Rows by id. What is random in them is a function of (seed, draw, row id, column): draw is the step, and 0 in a validation."""

    bytes_per_label: float  # of text, on average in this split: for tokenizers whose tokens are not bytes

    def __len__(self) -> int:
        """How many."""

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """These rows in this order."""

    def widest(self, n: int) -> Ids:
        """n rows, repeated where there are fewer, that make as wide a batch as any n."""

    def describe(self) -> str:
        """Lines on what was cut or left empty; '' where there is nothing to say."""


def widest(n: int, *widths: Ids) -> Ids:
    """n rows, repeated where there are fewer: the widest by each of these measures in turn.  widths: of every row."""
    by_turns = np.stack([np.argsort(-width, kind="stable")[:n] for width in widths], axis=1).ravel()
    return np.resize(np.array(list(dict.fromkeys(by_turns.tolist())), np.int64), n)


def repeated(n: int, n_rows: int) -> Ids:
    """The first n of these rows, from the first one on again where there are fewer."""
    return np.resize(np.arange(min(n, n_rows), dtype=np.int64), n)
