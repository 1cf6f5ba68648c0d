"""What every source of documents gives, and how documents are divided into training, validation and test."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple, TypeVar

from lm.data.sources.fingerprint import Files
from lm.errors import ConfigError
from lm.schema import Tree

T = TypeVar("T")
Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
ASSISTANT = "assistant"  # the role whose turns are learned
TOOLS = "tools"  # the role of what a chat may call, as a list in JSON
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython", "observation")
"""Who speaks in a chat, as the templates of published models call them."""
_KEY_CHARS = 1 << 16
_NEEDED = {ASSISTANT, "source", "target", "chosen", "rejected"}  # roles that say something


class Turn(NamedTuple):
    """A part of a record that is more than a text: who speaks (source and target of a pair; user, assistant ...), and what."""

    role: str
    text: str
    also: str = ""  # what else a message has, as an object in JSON: calls of tools, and which call it answers


@dataclass(frozen=True)
class Document:
    """One text, in chunks so that a huge one is never whole in memory; `chunks` is read once. Or a record of several turns."""

    split: Split
    chunks: Iterable[str]  # of a record: the text of each turn
    key: bytes  # of the beginning; equal documents have equal keys
    turns: tuple[Turn, ...] = ()


class Source(ABC):
    """Documents with what decides them. `documents()` reads all splits in one pass and can be called again."""

    def __init__(self, identity: Tree, hashed: Files | None = None) -> None:
        """identity: all that decides the documents beside files.  hashed: the files that are read."""
        self.identity = identity
        self._hashed = hashed
        self.files = hashed.by_name() if hashed is not None else {}  # SHA-256
        self.skipped = 0  # records left out in this pass, broken or with a blank answer
        self.passed_over: list[str] = []  # files of a kind that has to be named to be read
        self.forms: set[str] = set()  # that records were recognised to be of
        self._position = 0

    @property
    def total(self) -> int | None:
        """The bytes to be read; None: unknown."""
        return self._hashed.total() if self._hashed is not None else None

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """All documents; a broken one raises ConfigError with its place."""

    def divided(self, test_frac: float) -> Iterator[Document]:
        """Returns the documents with that part of the held-out ones set aside for the test, by another hash than holds them out."""
        for found in self.documents():
            aside = found.split == "val" and hashed_frac(b"test" + found.key) < test_frac
            yield replace(found, split="test") if aside else found

    def select(self, part: int, parts: int) -> None:
        """From now on give only part `part` of 1..parts of the documents; the parts in their order are the whole."""
        raise ConfigError(f"part={part}/{parts}: {self.looked_at()} cannot be divided. Prepare it whole.")

    def position(self) -> int:
        """Returns the bytes read of `total`, for a progress bar."""
        return self._position

    def held_out(self) -> str | None:
        """Returns which part of the documents that is, in words; None where the data itself names it."""
        return None

    def untouched(self) -> bool:
        """Returns whether the files look as they did when they were hashed; else no state is kept to go on from."""
        return self._hashed is None or self._hashed.untouched()

    def confirm(self) -> None:
        """Ends a pass: ConfigError where what was read is not what `files` says."""
        if self._hashed is not None:
            self._hashed.confirm()

    def _begin(self) -> None:
        """A new pass begins."""
        self.skipped = self._position = 0
        if self._hashed is not None:
            self._hashed.begin()

    def looked_at(self) -> str:
        """Returns the names of what was read, for an error message."""
        names = list(self.files) or [f"data={self.identity.get('kind')}"]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def share(items: Sequence[T], part: int, parts: int, what: str) -> list[T]:
    """Part `part` of 1..parts, in order. ConfigError where there are fewer items than parts."""
    if len(items) < parts:
        raise ConfigError(f"part={part}/{parts}: {len(items)} {what} are too few to be divided by {parts}. Use fewer parts.")
    return list(items[(part - 1) * len(items) // parts : part * len(items) // parts])


def hashed_frac(data: bytes) -> float:
    """A number in [0, 1) that depends on the bytes alone: a document stays in its split on every machine, and so do its copies."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64


def document(chunks: Iterable[str], split: Split | float) -> Document | None:
    """A document of the given split, or by its hash with that part in validation; None where there is only blank space."""
    head: list[str] = []
    rest = iter(chunks)
    for chunk in rest:
        head.append(chunk)
        if chunk.strip():
            key = _key(chunk)
            return Document(_split(key, split), chain(head, rest), key)
    return None


def turns_document(turns: Sequence[Turn], split: Split | float) -> Document | None:
    """A record of several turns, divided as `document` does; None where an answer, or a side of a pair, is only blank space, or all is."""
    texts = [turn.text + turn.also for turn in turns]
    blank = [turn.role for turn, text in zip(turns, texts, strict=True) if not text.strip()]
    if len(blank) == len(turns) or not _NEEDED.isdisjoint(blank):
        return None
    key = _key("\0".join(texts))
    return Document(_split(key, split), texts, key, tuple(turns))


def _key(text: str) -> bytes:
    return hashlib.blake2b(text[:_KEY_CHARS].encode(), digest_size=8).digest()


def _split(key: bytes, split: Split | float) -> Split:
    if not isinstance(split, float):
        return split
    return "val" if hashed_frac(key) < split else "train"
