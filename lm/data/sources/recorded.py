"""Sources whose records are what the config says: a text in a field, or several turns."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from lm.data.config import SourceConfig
from lm.data.records.base import RecordConfig, Values
from lm.data.records.fields import BadRecord, Line, parsed, text_of
from lm.data.sources.base import Document, Source, Split, document, turns_document
from lm.data.sources.fingerprint import Files
from lm.schema import Tree


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
    """A source whose records are what its config says."""

    def __init__(self, cfg: RecordedConfig, identity: Tree, hashed: Files | None = None, by_hash: bool = False) -> None:
        """by_hash: of a document decides whether it is held out; where that spares all of a few, one is held out all the same."""
        super().__init__(identity, hashed)
        self._field, self._record, self._skips = cfg.field, cfg.record, cfg.on_bad_record == "skip"
        self._held_out: bytes | None = None if by_hash else b""  # key of that one; None: not known yet

    def documents(self) -> Iterator[Document]:
        if self._held_out is None:
            self._held_out = self._spared()
        for found in self._pass():
            yield replace(found, split="val") if found.key == self._held_out else found

    @abstractmethod
    def _pass(self) -> Iterator[Document]:
        """Returns all documents, as their own hashes divide them."""

    def select(self, part: int, parts: int) -> None:
        self._held_out = b""

    def _spared(self) -> bytes:
        """The least key where no document is held out, and there are several; else none. Ends at the first one that is."""
        keys = set()
        for found in self._pass():
            if found.split == "val":
                return b""
            keys.add(found.key)
        return min(keys) if len(keys) > 1 else b""

    def _documents_of(self, records: Iterable[tuple[str, Line | Values]], split: Split | float) -> Iterator[Document]:
        """Of records with their places, without those of blank space; BadRecord names place, field and fault."""
        for where, record in records:
            try:
                found = self._document_of(record, where, split)
            except BadRecord as error:
                self._skip(error)
            else:
                if found is not None:
                    yield found

    def _skip(self, error: BadRecord) -> None:
        """Counts a broken record, or raises its error."""
        if not self._skips:
            raise error
        self.skipped += 1

    def _document_of(self, record: Line | Values, where: str, split: Split | float) -> Document | None:
        values = parsed(record, where) if isinstance(record, Line) else record
        if self._record is None:
            return document([text_of(values, self._field, "data.field", where)], split)
        named, form = self._record.recognised(values, where)
        self.forms |= {form} - {""}
        found = turns_document(named.turns(values, where), split)
        self.skipped += found is None
        return found
