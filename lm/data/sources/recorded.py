"""Sources of records whose form the config gives: a text in a field, or several turns."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from lm.data.config import SourceConfig
from lm.data.records.base import RecordConfig, Values
from lm.data.records.fields import BadRecord, Line, bad_record, parsed, text_of
from lm.data.sources.base import Document, Source, Split, document, turns_document
from lm.data.sources.fingerprint import Files
from lm.errors import ConfigError
from lm.schema import Tree

_MOST_UNREAD, _MOST_CHARS = 20, 60  # names of unread fields that are told, about, and how much of each


class RecordedConfig(SourceConfig):
    """What sources of records share."""

    field: str = "text"
    """The field or column that holds the text, where `record` is null."""
    record: RecordConfig | None = None
    """What a record is. null: a text."""
    on_bad_record: Literal["error", "skip"] = "error"
    """What a broken record does; skipped ones are counted."""

    @property
    def records(self) -> RecordConfig | None:
        return self.record


class RecordedSource(Source):
    """A source of records whose form its config gives."""

    def __init__(self, cfg: RecordedConfig, identity: Tree, hashed: Files | None = None, by_hash: bool = False) -> None:
        """by_hash: each document's hash decides whether it is held out; if that holds out none of several, one is held out still."""
        super().__init__(identity, hashed)
        self._field, self._record, self._skips = cfg.field, cfg.record, cfg.on_bad_record == "skip"
        self._column = cfg.field if cfg.record is None else None  # all that is read of a table; None: all its columns
        self._held_out: bytes | None = None if by_hash else b""  # key of the document held out still; b"": none; None: not known yet

    def documents(self) -> Iterator[Document]:
        held_out = self._spared()
        for found in self._pass():
            yield replace(found, split="val") if found.key == held_out else found

    @abstractmethod
    def _pass(self) -> Iterator[Document]:
        """Yields all documents, divided by their own hashes."""

    def select(self, part: int, parts: int) -> None:
        self._spared()  # of the whole

    def _spared(self) -> bytes:
        """Returns the least key where there are several documents and none is held out; else b"". Stops at the first held-out document."""
        if self._held_out is None:
            keys: set[bytes] = set()
            for found in self._pass():
                if found.split == "val":
                    keys.clear()
                    break
                keys.add(found.key)
            self._held_out = min(keys) if len(keys) > 1 else b""
        return self._held_out

    def _documents_of(self, records: Iterable[tuple[str, Line | Values]], split: Split | float) -> Iterator[Document]:
        """Yields the documents of (place, record) pairs, without blank ones. Raises BadRecord, which names place, field and fault."""
        for where, record in records:
            try:
                found = self._document_of(record, where, split)
            except BadRecord as error:
                self._skip(error)
            else:
                if found is not None:
                    yield found

    def _skip(self, error: BadRecord) -> None:
        """Counts a broken record where on_bad_record=skip; else raises its error."""
        if not self._skips:
            raise error
        self.skipped += 1
        self.first_fault = self.first_fault or error.sentence.rpartition(". ")[0]  # without the remedy

    def _refuse(self, where: str, error: ConfigError) -> None:
        """Treats a record that cannot be written as a broken one, unless it is one."""
        self._skip(error if isinstance(error, BadRecord) else bad_record(f"{where}: {error.sentence.removesuffix('.')}"))

    def _document_of(self, record: Line | Values, where: str, split: Split | float) -> Document | None:
        values = parsed(record, where) if isinstance(record, Line) else record
        if self._record is None:
            return document([text_of(values, self._field, "data.field", where)], split)
        named, form = self._record.recognised(values, where)
        self.forms |= {form} - {""}
        found = turns_document(named.turns(values, where), split)
        if len(self.unread) < _MOST_UNREAD:
            self.unread |= {name[:_MOST_CHARS] for name in named.unread(values)}
        self.skipped += found is None
        return None if found is None else replace(found, refuse=partial(self._refuse, where))
