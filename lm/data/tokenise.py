"""From documents to token stores on disk: encoding on all cores while the next documents are read, resumable after a kill."""

import json
import os
import queue
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lm.config import Tree
from lm.data.cache import Log
from lm.data.pieces import MakePieces, Piece
from lm.data.progress import progress
from lm.data.shards import ShardWriter
from lm.data.source import SPLITS, Document, Source, Split
from lm.data.tokenizer import Tokenizer

_BATCH_CHARS = 1 << 22
_ZLIB_BYTES = 1 << 26
_STATE_CHARS = 1 << 26  # between two states to resume from
_STATE = "state.json"
_AHEAD = 2  # batches that are read while one is encoded


def tokenise(source: Source, tokenizer: Tokenizer, make_pieces: MakePieces, folder: Path, log: Log) -> Tree:
    """Writes both splits into `folder`, going on where a killed process left off, and returns their part of index.json."""
    stores = _Stores(folder, tokenizer, log)
    with progress("Tokenising", source.total, log) as done:
        pieces = (piece for document in stores.counted(source.documents()) for piece in make_pieces(document))
        batches = _batches(stores.measured(pieces))
        for batch, position in _read_ahead(batches, source.position):
            stores.add(batch)
            done(position)
    return {**stores.close(), "skipped": source.skipped}


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """As many pieces as are worth encoding at once; the number of characters bounds the memory."""
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars > _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    yield batch


def _read_ahead(batches: Iterator[list[Piece]], position: Callable[[], int]) -> Iterator[tuple[list[Piece], int]]:
    """The batches, read by a thread while the ones before are encoded, with the bytes read up to there. An error is raised here."""
    ready: queue.Queue[tuple[list[Piece], int] | BaseException | None] = queue.Queue(_AHEAD)
    stopped = threading.Event()

    def hand_over(item: tuple[list[Piece], int] | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def read() -> None:
        try:
            for batch in batches:
                hand_over((batch, position()))
                if stopped.is_set():
                    return
            hand_over(None)
        except BaseException as error:
            hand_over(error)

    reader = threading.Thread(target=read, name="reader", daemon=True)
    reader.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        reader.join()


class _Stores:
    """Both splits while they are written, and what is counted on the way.

    Up to where the state of a killed process reaches, documents are only counted: their tokens are there.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, log: Log) -> None:
        self.documents: Counter[Split] = Counter()
        self._folder, self._tokenizer = folder, tokenizer
        state = _read_state(folder)
        self._skip: int = state.get("documents", 0)
        self._writers = {s: ShardWriter(folder, s, tokenizer.vocab_size, state=state.get("splits", {}).get(s)) for s in SPLITS}
        self._lossless: bool | None = state.get("lossless")
        self._zlib = zlib.compressobj(9)
        self._zlib_in = self._zlib_out = 0
        self._done = self._chars = 0
        if self._skip:
            log(f"Going on after {self._skip:,} documents that an earlier process has tokenised.")

    def counted(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents, counted as they pass."""
        for document in documents:
            self.documents[document.split] += 1
            yield document

    def add(self, batch: list[Piece]) -> None:
        """Encodes and writes."""
        to_write = []
        for piece in batch:
            if self._done >= self._skip:
                to_write.append(piece)
            self._done += piece.ends
        for piece, ids in zip(to_write, self._tokenizer.encode_arrays([piece.text for piece in to_write]), strict=True):
            if self._lossless is None:
                self._lossless = self._tokenizer.decode(ids.tolist()) == piece.text
            self._write(piece, ids)
            self._chars += len(piece.text)
        if self._chars > _STATE_CHARS and batch[-1].ends:
            self._chars = 0
            self._save_state()

    def _write(self, piece: Piece, ids: Any) -> None:
        writer = self._writers[piece.split]
        if piece.starts:
            writer.start_document()
        if piece.part is not None:
            writer.start_part(piece.part)
        n_bytes = len(piece.text.encode()) if piece.counted else 0
        writer.add(np.concatenate([np.array(piece.head, np.uint32), ids, np.array(piece.tail, np.uint32)]), n_bytes)

    def measured(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The pieces, those of the validation packed as they pass."""
        for piece in pieces:
            if piece.split == "val" and piece.counted and self._zlib_in < _ZLIB_BYTES:
                data = piece.text.encode()
                self._zlib_in += len(data)
                self._zlib_out += len(self._zlib.compress(data))
            yield piece

    def _save_state(self) -> None:
        splits = {split: writer.save() for split, writer in self._writers.items()}
        state = {"documents": self._done, "splits": splits, "lossless": self._lossless}
        half = self._folder / f"{_STATE}.half"
        half.write_text(json.dumps(state))
        os.replace(half, self._folder / _STATE)

    def close(self) -> Tree:
        """Their part of index.json."""
        splits = {split: writer.close() for split, writer in self._writers.items()}
        (self._folder / _STATE).unlink(missing_ok=True)
        zlib_bytes = self._zlib_out + len(self._zlib.flush())
        return {
            "splits": splits,
            "documents": dict(self.documents),
            "lossless": self._lossless,
            "zlib": [self._zlib_in, zlib_bytes],
        }


def _read_state(folder: Path) -> Tree:
    """Empty where there is none."""
    try:
        return dict(json.loads((folder / _STATE).read_text()))
    except (OSError, ValueError):
        return {}
