"""Span corruption: spans of a text are taken out, a sentinel standing for each, and are to be said behind their sentinels.

Raffel et al. 2019, arXiv:1910.10683, sections 3.1.4 and 3.3.4; Tay et al. 2022, arXiv:2205.05131, section 3.1 (UL2).
"""

import numpy as np
from numpy.typing import NDArray

from lm.data.order import Ids

Chance = NDArray[np.float64]
Mask = NDArray[np.bool_]


def counts(length: int, noise_frac: float, mean_span: float) -> tuple[int, int]:
    """(tokens taken out, spans) of a text of this many tokens, two or more: at least one each, and as many left as there are spans."""
    taken = min(max(round(length * noise_frac), 1), length - 1)
    return taken, min(max(round(taken / mean_span), 1), taken, length - taken)


def noise_mask(length: int, noise_frac: float, mean_span: float, chance: Chance) -> Mask:
    """(length,) True where a token is taken out. All ways to cut into so many spans are equally likely; the first token stays.

    chance: (2, length or more) independent numbers in [0, 1).
    """
    taken, spans = counts(length, noise_frac, mean_span)
    kept_lens = _segments(length - taken, spans, chance[0])
    taken_lens = _segments(taken, spans, chance[1])
    lengths = np.stack([kept_lens, taken_lens], axis=1).ravel()  # kept first, so that it ends with a span
    return np.repeat(np.arange(2 * spans) % 2 == 1, lengths)


def corrupted(tokens: Ids, mask: Mask, sentinels: Ids) -> tuple[Ids, Ids]:
    """(what is left with a sentinel for each span, the spans behind their sentinels)."""
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    number = np.cumsum(begins) - 1
    left = np.where(begins, sentinels[np.maximum(number, 0)], tokens)[~mask | begins]
    at = np.flatnonzero(begins)
    taken = np.insert(tokens[mask], np.searchsorted(np.flatnonzero(mask), at), sentinels[: len(at)])
    return left, taken


def most_raw(width: int, noise_frac: float, mean_span: float, joined: bool) -> int:
    """The longest text whose corrupted form fits into `width`; joined: with the spans behind, but the last token."""
    return max(length for length in range(2, 2 * width) if _places(*counts(length, noise_frac, mean_span), length, joined) <= width)


def _places(taken: int, spans: int, length: int, joined: bool) -> int:
    return length + 2 * spans if joined else max(length - taken + spans, taken + spans + 1)


def _segments(n: int, parts: int, chance: Chance) -> Ids:
    """n as a sum of `parts` numbers of 1 or more, every way equally likely."""
    cuts = np.sort(np.argsort(chance[: n - 1])[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=n)
