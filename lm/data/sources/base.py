"""The interface of sources of documents, and the division of documents into training, validation and test."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

from lm.data.sources.fingerprint import Files
from lm.errors import ConfigError
from lm.schema import Tree
from lm.units import counted

T = TypeVar("T")
Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
ASSISTANT = "assistant"  # the role whose turns a model learns
TOOLS = "tools"  # the role of a turn that holds a chat's tools, as a JSON list
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython", "observation")
"""Who speaks in a chat, as the templates of published models call them."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message beside its content, as the templates of published models call them."""
_KEY_CHARS = 1 << 16
_NEEDED = {ASSISTANT, "source", "target", "label", "chosen", "rejected"}  # roles whose text must not be blank


class Turn(NamedTuple):
    """One turn of a record that is no plain text: its role (source or target of a pair; user, assistant ...) and its text."""

    role: str
    text: str
    also: str = ""  # a message's further fields, as a JSON object: tool calls, thoughts, or the call it answers


def _raised(error: ConfigError) -> None:
    raise error


@dataclass(frozen=True)
class Document:
    """A text, or a record of several turns. A text comes in chunks, so that a huge one is never whole in memory; `chunks` can be iterated
    once."""

    split: Split
    chunks: Iterable[str]  # of a record: the text of each turn
    key: bytes  # hash of the beginning; equal documents have equal keys
    turns: tuple[Turn, ...] = ()
    refuse: Callable[[ConfigError], None] = _raised  # told why its turns cannot be written: raises, or counts it as left out


class Source(ABC):
    """Documents, with the identity that decides them. `documents()` reads all splits in one pass and can be called again."""

    def __init__(self, identity: Tree, hashed: Files | None = None) -> None:
        """identity: everything besides files that decides the documents.  hashed: the files that are read."""
        self.identity = identity
        self._hashed = hashed
        self.files = hashed.by_name() if hashed is not None else {}  # SHA-256
        self.skipped = 0  # records left out in this pass, because they are broken or have a blank answer
        self.first_fault = ""  # of the first that is broken
        self.remarks: list[str] = []  # sentences for the log: files that are not read
        self.forms: set[str] = set()  # the forms in which records were recognised
        self.unread: set[str] = set()  # names of their fields that are not read
        self._position = 0

    @property
    def total(self) -> int | None:
        """The number of bytes to read; None: unknown."""
        return self._hashed.total() if self._hashed is not None else None

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yields all documents. Raises ConfigError with the place of a broken one."""

    def each(self) -> Iterator[Document]:
        """Yields what `documents` does. Raises ConfigError where a source of one's own yields something else."""
        given: Iterable[Any] | None = self.documents()
        for found in given or ():
            if not isinstance(found, Document):
                rule = "and a source yields what document(...) or turns_document(...) makes"
                raise ConfigError(f"{type(self).__name__}: documents() has yielded {found!r:.80}, {rule}. Correct it.")
            yield found

    def divided(self, test_frac: float) -> Iterator[Document]:
        """Yields all documents, with `test_frac` of the held-out ones moved to the test, decided by another hash than the holding out."""
        for found in self.each():
            aside = found.split == "val" and hashed_frac(b"test" + found.key) < test_frac
            yield replace(found, split="test") if aside else found

    def select(self, part: int, parts: int) -> None:
        """Restricts the source to part `part` of 1..parts of its documents; all parts in order are the whole. Raises ConfigError where the
        source cannot be divided."""
        raise ConfigError(f"part={part}/{parts}: {self.looked_at()} cannot be divided. Prepare it whole.")

    def position(self) -> int:
        """Returns how many bytes of `total` have been read, for a progress bar."""
        return self._position

    def held_out(self) -> str | None:
        """Returns which part of the documents is held out, in words; None where the config or the data names the held-out documents."""
        return None

    def untouched(self) -> bool:
        """Returns whether the files look as they did when they were hashed; where they do not, no state to resume from may be saved."""
        return self._hashed is None or self._hashed.untouched()

    def confirm(self) -> None:
        """Ends a pass. Raises ConfigError where the content read does not have the hashes in `files`."""
        if self._hashed is not None:
            self._hashed.confirm()

    def _begin(self) -> None:
        """Begins a new pass."""
        self.skipped, self._position, self.first_fault = 0, 0, ""
        if self._hashed is not None:
            self._hashed.begin()

    def looked_at(self) -> str:
        """Returns the names of what was read, for an error message."""
        names = list(self.files) or [f"data={self.identity.get('kind')}"]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def share(items: Sequence[T], part: int, parts: int, what: str) -> list[T]:
    """Returns part `part` of 1..parts of the items, in order. Raises ConfigError where there are fewer items than parts.

    what: an item, in a word.
    """
    if len(items) < parts:
        raise ConfigError(
            f"part={part}/{parts}: {parts} parts cannot be made of {counted(len(items), what)}. Use fewer, or prepare it whole."
        )
    return list(items[(part - 1) * len(items) // parts : part * len(items) // parts])


def hashed_frac(data: bytes) -> float:
    """Returns a number in [0, 1) that depends only on the bytes: a document and its copies are in the same split on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64


def document(chunks: Iterable[str], split: Split | float) -> Document | None:
    """Returns a document of these chunks, or of one text; None where it is blank.  split: its split, or the part of documents that a hash
    puts into validation."""
    head: list[str] = []
    rest = iter([chunks] if isinstance(chunks, str) else chunks)
    for chunk in rest:
        head.append(chunk)
        if chunk.strip():
            key = _key(chunk)
            return Document(_split(key, split), chain(head, rest), key)
    return None


def turns_document(turns: Sequence[Turn], split: Split | float) -> Document | None:
    """Returns a record of several turns as a document; None where an answer, a side of a pair, or everything is blank.  split: as in
    `document`."""
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
