"""Encodes a text given in parts, such as a chat template writes, to the ids that the library gives for the whole text."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lm.data.tokenizer.tokenizer import Tokenizer

Part = int | str


def together(tokenizer: Tokenizer, parts: Sequence[Part]) -> NDArray[np.int64]:
    """Returns (3, n): ids, and for each the numbers of the first and the last part from which its text comes.

    parts: texts, and ids of special tokens. The whole text is encoded with special tokens read out of it, as transformers does: some of
    these take in blanks beside them, and no extra space goes before each part's text, as some tokenizers add. Where a text part spells a
    special token, it must stay text: then each stretch between special tokens is encoded alone.
    """
    texts = [tokenizer.special_names[part] if isinstance(part, int) else part for part in parts]
    whole, edges = "".join(texts), np.cumsum([len(text) for text in texts])
    spells_none = tokenizer.split_specials(whole) == _joined(parts)
    ids, starts, ends = tokenizer.places(whole, specials=True) if spells_none else _apart(tokenizer, parts)
    first, last = (np.searchsorted(edges[:-1], at, "right") for at in (starts, np.maximum(starts, ends - 1)))
    return np.stack([ids, first, last])


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts with adjacent texts joined, and without empty texts."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return found


def _apart(tokenizer: Tokenizer, parts: Sequence[Part]) -> NDArray[np.int64]:
    """As `Tokenizer.places`, with each text between special tokens encoded by itself."""
    found, at = [np.empty((3, 0), np.int64)], 0
    for part in _joined(parts):
        length = len(tokenizer.special_names[part] if isinstance(part, int) else part)
        here = np.array([[part], [0], [length]]) if isinstance(part, int) else tokenizer.places(part, specials=False)
        found.append(here + np.array([[0], [at], [at]]))
        at += length
    return np.concatenate(found, 1)
