"""Rows of a decoder-only model out of examples: tokens to be read and tokens to be learned, one or several examples a row."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lm.data.order import Ids
from lm.nn.batch import IGNORED, Batch


class Example(NamedTuple):
    """n tokens, which take n - 1 places of a row: the last one is only ever predicted."""

    tokens: Ids  # (n,)
    learned: NDArray[np.bool_]  # (n,) whether the token is predicted; the first never is

    @classmethod
    def of(cls, given: Ids, learned: Ids) -> "Example":
        """Read `given`, predict `learned`."""
        mask = np.arange(len(given) + len(learned)) >= len(given)
        return cls(np.concatenate([given, learned]), mask)

    def prefix_len(self) -> int:
        """How many tokens stand before the first learned one."""
        return int(np.argmax(self.learned)) if self.learned.any() else len(self.tokens)


def joined_batch(rows: list[list[Example]], width: int, pad: int, prefix: bool = False) -> Batch:
    """One row per list. Examples do not see each other, and positions restart.

    prefix: what stands before an example's first learned token is seen by all of its tokens, not only by later ones.
    """
    shape = len(rows), width
    tokens, labels = np.full(shape, pad, np.int64), np.full(shape, IGNORED, np.int64)
    positions, documents = np.full(shape, -1, np.int64), np.full(shape, -1, np.int32)
    seen = np.zeros(shape, np.bool_)
    for row, examples in enumerate(rows):
        at = 0
        for number, example in enumerate(examples):
            n = len(example.tokens) - 1
            span = slice(at, at + n)
            tokens[row, span] = example.tokens[:-1]
            labels[row, span] = np.where(example.learned[1:], example.tokens[1:], IGNORED)
            positions[row, span], documents[row, span] = np.arange(n), number
            seen[row, at : at + min(n, example.prefix_len())] = True
            at += n
        assert at <= width
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(positions),
        torch.from_numpy(documents),
        prefix=torch.from_numpy(seen) if prefix else None,
    )
