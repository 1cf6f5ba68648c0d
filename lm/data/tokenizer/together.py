"""Encodes a text given in parts, such as a chat template writes, to the ids that the library gives for the whole text."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from lm.data.tokenizer.tokenizer import Tokenizer

Part = int | str


def together(tokenizer: Tokenizer, parts: Sequence[Part]) -> list[tuple[int, int, int]]:
    """Returns each id with the first and the last part from which its text comes.

    parts: texts, and ids of special tokens. The whole text is encoded with special tokens read out of it, as transformers does: some of
    these take in blanks beside them, and no extra space goes before each part's text, as some tokenizers add. Where a text part spells a
    special token, it must stay text: then each stretch between special tokens is encoded alone.
    """
    texts = [tokenizer.special_names[part] if isinstance(part, int) else part for part in parts]
    ends = list(accumulate(map(len, texts)))
    whole = "".join(texts)
    places = tokenizer.places(whole, specials=True) if tokenizer.split_specials(whole) == _joined(parts) else _apart(tokenizer, parts)
    return [(i, bisect_right(ends, start), bisect_right(ends, max(start, end - 1))) for i, start, end in places]


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts with adjacent texts joined, and without empty texts."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return found


def _apart(tokenizer: Tokenizer, parts: Sequence[Part]) -> Iterator[tuple[int, int, int]]:
    at = 0
    for part in _joined(parts):
        if isinstance(part, int):
            yield part, at, at + len(tokenizer.special_names[part])
        else:
            yield from ((i, at + start, at + end) for i, start, end in tokenizer.places(part, specials=False))
        at += len(tokenizer.special_names[part] if isinstance(part, int) else part)
