"""Encodes a text given in parts, such as a chat template writes, to the ids that the library gives for the whole text."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lm.data.tokenizer.tokenizer import Tokenizer

Part = int | str


def together(tokenizer: Tokenizer, parts: Sequence[Part]) -> NDArray[np.int64]:
    """Returns (3, n): ids, and for each the numbers of the first and the last part from which its text comes.

    parts: texts, and ids of special tokens, or of others that were added to a vocabulary. The whole text is encoded with special tokens
    read out of it, as transformers does: some of these take in blanks beside them, and no extra space goes before each part's text, as some
    tokenizers add. Where a text part spells a special token, it must stay text, and an id of another added one must stay that: then each
    stretch between them is encoded alone.
    """
    texts = [tokenizer.added_names[part] if isinstance(part, int) else part for part in parts]
    whole, edges = "".join(texts), np.cumsum([len(text) for text in texts])
    places = tokenizer.places(whole, specials=True) if tokenizer.split_specials(whole) == _joined(parts) else None
    if places is None or _specials(tokenizer, places[0]) != _specials(tokenizer, parts):  # the library may find others in a normalized text
        places = _apart(tokenizer, parts)
    ids, starts, ends = places
    first, last = (np.searchsorted(edges[:-1], at, "right") for at in (starts, np.maximum(starts, ends - 1)))
    return np.stack([ids, first, last])


def _specials(tokenizer: Tokenizer, found: Iterable[Part]) -> list[int]:
    """Returns the special tokens among ids and texts; the one for what is unknown is of a text."""
    return [int(i) for i in found if i in tokenizer.special_names and i != tokenizer.unknown]


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
        length = len(tokenizer.added_names[part] if isinstance(part, int) else part)
        here = np.array([[part], [0], [length]]) if isinstance(part, int) else tokenizer.places(part, specials=False)
        found.append(here + np.array([[0], [at], [at]]))
        at += length
    return np.concatenate(found, 1)
