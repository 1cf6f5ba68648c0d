"""Span corruption: spans of a text are each replaced by a sentinel, and the target is each span after its sentinel.

Raffel et al. 2019, arXiv:1910.10683, sections 3.1.4 and 3.3.4; Tay et al. 2022, arXiv:2205.05131, section 3.1 (UL2).
"""

import numpy as np
from numpy.typing import NDArray

from lm.data.order import Ids

Chance = NDArray[np.float64]
Mask = NDArray[np.bool_]


def counts(length: int, noise_frac: float, mean_span: float) -> tuple[int, int]:
    """Returns (tokens taken out, number of spans) for a text of `length` tokens, two or more: at least one each, and at least as many
    tokens stay as there are spans."""
    taken = min(max(round(length * noise_frac), 1), length - 1)
    return taken, min(max(round(taken / mean_span), 1), taken, length - taken)


def noise_mask(length: int, noise_frac: float, mean_span: float, chance: Chance) -> Mask:
    """Returns (length,) bool: True where a token is taken out. All ways to place the spans are equally likely; the first token stays.

    chance: (2, length or more) independent numbers in [0, 1).
    """
    taken, spans = counts(length, noise_frac, mean_span)
    kept_lens = _segments(length - taken, spans, chance[0])
    taken_lens = _segments(taken, spans, chance[1])
    lengths = np.stack([kept_lens, taken_lens], axis=1).ravel()  # a kept stretch first, so that the text ends with a span
    return np.repeat(np.arange(2 * spans) % 2 == 1, lengths)


def corrupted(tokens: Ids, mask: Mask, sentinels: Ids) -> tuple[Ids, Ids]:
    """Returns (the text with a sentinel for each span, the spans, each after its sentinel)."""
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    number = np.cumsum(begins) - 1
    left = np.where(begins, sentinels[np.maximum(number, 0)], tokens)[~mask | begins]
    at = np.flatnonzero(begins)
    taken = np.insert(tokens[mask], np.searchsorted(np.flatnonzero(mask), at), sentinels[: len(at)])
    return left, taken


def most_raw(width: int, noise_frac: float, mean_span: float, joined: bool) -> int:
    """Returns the length of the longest text whose corrupted form fits into `width`; 0 where no text does.  joined: the form is inputs and
    targets in one row, without the last token."""
    fitting = (length for length in range(2, 2 * width) if _places(*counts(length, noise_frac, mean_span), length, joined) <= width)
    return max(fitting, default=0)


def _places(taken: int, spans: int, length: int, joined: bool) -> int:
    return length + 2 * spans if joined else max(length - taken + spans, taken + spans + 1)


def _segments(n: int, parts: int, chance: Chance) -> Ids:
    """Returns n split into a sum of `parts` numbers, each at least 1; every split is equally likely."""
    cuts = np.sort(np.argsort(chance[: n - 1])[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=n)
