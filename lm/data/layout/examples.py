"""Rows of a decoder-only model from examples, which are tokens to read and tokens to learn; one or several examples per row."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.order import Ids
from lm.nn.batch import IGNORED, Batch


class Example(NamedTuple):
    """n tokens, which take n - 1 places of a row: the last token is only a label."""

    tokens: Ids  # (n,)
    learned: NDArray[np.bool_]  # (n,) whether the token is predicted; the first never is

    @classmethod
    def of(cls, given: Ids, learned: Ids) -> "Example":
        """Returns an example that reads `given` and predicts `learned`."""
        mask = np.arange(len(given) + len(learned)) >= len(given)
        return cls(np.concatenate([given, learned]), mask)

    def prefix_len(self) -> int:
        """Returns the number of tokens before the first learned one."""
        return int(np.argmax(self.learned)) if self.learned.any() else len(self.tokens)


def joined_batch(rows: list[list[Example]], width: int, pad: int, prefix: bool = False) -> Batch:
    """Returns a batch with one row per list. Examples do not attend to each other, and positions restart in each.

    prefix: all tokens of an example attend to those before its first learned token (prefix LM); else attention is causal.
    """
    tokens = [[example.tokens[:-1] for example in row] for row in rows]
    labels = [[np.where(example.learned[1:], example.tokens[1:], IGNORED) for example in row] for row in rows]
    seen = [[np.arange(len(example.tokens) - 1) < example.prefix_len() for example in row] for row in rows]
    return Batch(
        side_by_side(tokens, width, pad),
        side_by_side(labels, width, IGNORED),
        *places_of(tokens, width),
        prefix=side_by_side(seen, width, False) if prefix else None,
    )


def side_by_side(rows: Sequence[Sequence[NDArray[Any]]], width: int, fill: int) -> Tensor:
    """Returns (rows, width): the pieces of each row concatenated and padded with `fill`, which decides the dtype."""
    found = np.full((len(rows), width), fill)
    for row, pieces in zip(found, rows, strict=True):
        whole = np.concatenate([row[:0], *pieces])
        row[: len(whole)] = whole
    return torch.from_numpy(found)


def places_of(rows: Sequence[Sequence[Ids]], width: int) -> tuple[Tensor, Tensor]:
    """Returns (positions, documents), each (rows, width), of texts that are side by side in rows; -1 in the padding."""
    positions = side_by_side([[np.arange(len(text)) for text in row] for row in rows], width, -1)
    documents = side_by_side([[np.full(len(text), number) for number, text in enumerate(row)] for row in rows], width, -1)
    return positions, documents.int()
