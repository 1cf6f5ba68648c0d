"""How a model reads the texts that it tells apart."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lm.data.layout.examples import places_of, side_by_side
from lm.data.order import Ids
from lm.data.tokenizer.source import behind, between
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.batch import Batch
from lm.nn.model_config import ModelConfig


class Read(NamedTuple):
    """The ids that a model reads, and the segment of each. None: the model, or its tokenizer, tells no segments apart.  cut: its texts lost
    an end."""

    ids: Ids
    segments: Ids | None
    cut: bool = False


class Reading:
    """How a model reads a text, or two, that it is to classify."""

    def __init__(self, model: ModelConfig | None, tokenizer: Tokenizer, most: int) -> None:
        """model: None: a decoder.  most: tokens that it reads at the most; the end of a longer text is left out."""
        self._both_ways = model is not None and model.kind == "encoder"
        self._prefix, self._behind, self._most = tokenizer.prefix, behind(tokenizer, self._both_ways), most
        self._between, segment = between(tokenizer, self._both_ways)
        self._segmented = segment == 1 and model is not None and (model.embed.segments or 1) > 1
        self._tokenizer = tokenizer

    def text(self, text: str, pair: str | None = None) -> Read:
        """Returns what `read` does of a text, and of a second one, if any."""
        second = None if pair is None else np.array(self._tokenizer.encode(pair), np.int64)
        return self.read(np.array([*self._prefix, *self._tokenizer.encode(text)], np.int64), second)

    def read(self, begun: Ids, second: Ids | None = None) -> Read:
        """begun: the ids of what a text begins with, and of the text; second: of a second text."""
        after, room = np.array(self._behind, np.int64), self._most - len(self._behind)
        if second is None:
            ids = np.concatenate([begun[:room], after])
            return Read(ids, np.zeros_like(ids) if self._segmented else None, len(begun) > room)
        most = _longest_first(len(begun) - len(self._prefix), len(second), room - len(self._prefix) - len(self._between))
        first = [begun[: len(self._prefix) + most[0]], np.array(self._between, np.int64)]
        ids = np.concatenate([*first, second[: most[1]], after])[: self._most]
        behind_first = np.arange(len(ids)) >= sum(map(len, first))
        cut = sum(most) < len(begun) - len(self._prefix) + len(second)
        return Read(ids, behind_first.astype(np.int64) if self._segmented else None, cut)

    def as_it_is(self, ids: Ids) -> Read:
        """Returns what `read` does of all that a model is to read, such as a chat."""
        return Read(ids, np.zeros_like(ids) if self._segmented else None)

    def added(self, pair: bool) -> int:
        """Returns how many ids stand beside the texts and what they begin with."""
        return len(self._behind) + (len(self._between) if pair else 0)

    def place(self, n: int) -> int:
        """Returns at which of n tokens the label is read off: the first sees all in an encoder, the last in a decoder."""
        return 0 if self._both_ways else n - 1


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens are left of two texts that have room together: the longer loses its end until both are equal (transformers'
    longest_first, whose half of an odd room is the first's where the second is no shorter)."""
    if first + second <= room:
        return first, second
    short = min(first, second, max(room, 0) // 2)
    return (short, max(room, 0) - short) if first <= second else (max(room, 0) - short, short)


def batch_of(read: Sequence[Sequence[Read]], width: int, pad: int, labels: Tensor | None = None) -> Batch:
    """Returns a batch of rows of what was read."""
    rows = [[each.ids for each in row] for row in read]
    segments = [[each.segments for each in row if each.segments is not None] for row in read]
    beside = side_by_side(segments, width, 0) if any(segments) else None
    return Batch(side_by_side(rows, width, pad), labels, *places_of(rows, width), segments=beside)
