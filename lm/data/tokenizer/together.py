"""The ids of a text that is given in parts, as the library has them of the whole: what a chat template writes."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from lm.data.tokenizer.tokenizer import Tokenizer

Part = int | str


def together(tokenizer: Tokenizer, parts: Sequence[Part]) -> list[tuple[int, int, int]]:
    """Returns each id with the first and the last of the parts that it is of.

    parts: texts, and ids of special tokens, which are read out of the whole text as transformers reads them: with the blanks beside them
    that they take, and without the space that some tokenizers put before each text. Where a part only spells a special token, it stays
    text: then what stands between special tokens is encoded alone.
    """
    texts = [tokenizer.special_names[part] if isinstance(part, int) else part for part in parts]
    ends = list(accumulate(map(len, texts)))
    whole = "".join(texts)
    places = tokenizer.places(whole, specials=True) if tokenizer.split_specials(whole) == _joined(parts) else _apart(tokenizer, parts)
    return [(i, bisect_right(ends, start), bisect_right(ends, max(start, end - 1))) for i, start, end in places]


def _joined(parts: Sequence[Part]) -> list[Part]:
    """With texts that stand side by side as one, and without empty ones."""
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
