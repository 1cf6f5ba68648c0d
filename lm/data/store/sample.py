"""The texts that a tokenizer is trained on."""

from collections.abc import Callable, Iterator
from itertools import chain

from lm.data.sources.base import Source, hashed_frac
from lm.data.sources.compressed import PACKED
from lm.data.tokenizer.tokenizer import split_text

_TRIED = 1 << 23  # characters of packed files by which the size of all their text is judged


def training_texts(source: Source, done: Callable[[int], None], left: int) -> Iterator[str]:
    """Yields texts of the training split; of a split larger than `left` characters only those that a hash picks, or the beginning where it
    picks none."""
    picked = _picked(source, 1.0 if source.total is None else min(1.0, left / max(1.0, source.total * _chars_per_byte(source))))
    first = next(picked, None)
    for text in _picked(source, 1.0) if first is None else chain([first], picked):
        done(source.position())
        yield text[:left]
        left -= len(text)
        if left <= 0:
            break
    source.confirm()


def _chars_per_byte(source: Source) -> float:
    """Returns how many characters of training text a stored byte holds: of packed files as many as in their beginning, of others one."""
    if not any(name.lower().endswith((*PACKED, ".parquet")) for name in source.files):
        return 1.0
    chars = 0
    for document in source.each():
        chars += sum(map(len, document.chunks)) if document.split == "train" else 0
        if chars >= _TRIED:
            break
    return chars / max(1, source.position())


def _picked(source: Source, frac: float) -> Iterator[str]:
    """Yields the texts of the training split, in pieces; with `frac` below 1 only the pieces that another hash picks than that of the
    holding out, which leaves training the documents above its share. A short document has one piece."""
    for document in source.each():
        if document.split == "train":
            for number, text in enumerate(split_text(document.chunks)):
                if frac == 1 or hashed_frac(b"tokenizer" + document.key + number.to_bytes(8, "big")) < frac:
                    yield text
