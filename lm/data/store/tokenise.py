"""From documents to token stores on disk: encoding on all cores while others are read and written, resumable after a kill."""

import json
import os
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm.config import Tree
from lm.data.sources.base import SPLITS, Source, Split
from lm.data.store.cache import Log
from lm.data.store.pieces import MakePieces, Piece
from lm.data.store.progress import progress
from lm.data.store.shards import ShardWriter
from lm.data.tokenizer.tiktoken_ import Encode, fastest
from lm.data.tokenizer.tokenizer import Tokenizer

Ids = NDArray[np.uint32]
_BATCH_CHARS = 1 << 21
_ZLIB_BYTES = 1 << 26
_STATE_CHARS = 1 << 26  # between two states to resume from
_STATE = "state.json"
_AT_ONCE = 2  # batches that are encoded while one is written


def tokenise(source: Source, tokenizer: Tokenizer, make_pieces: MakePieces, folder: Path, log: Log) -> Tree:
    """Writes both splits into `folder`, going on where a killed process left off, and returns their part of index.json."""
    stores = _Stores(folder, tokenizer, log)
    pieces = (piece for document in source.documents() for piece in make_pieces(document))
    with progress("Tokenising", source.total) as done:
        for batch, ids in _encoded(_batches(stores.unwritten(pieces)), fastest(tokenizer)):
            stores.add(batch, ids)
            done(source.position())
    return {**stores.close(), "skipped": source.skipped}


def _encoded(batches: Iterable[list[Piece]], encode: Encode) -> Iterator[tuple[list[Piece], list[Ids]]]:
    """Each batch with the ids of its pieces, while the next ones are read and encoded.

    Two at once, since towards the end of a batch some cores have nothing left to do.
    """
    waiting: deque[tuple[list[Piece], Future[list[Ids]]]] = deque()
    with ThreadPoolExecutor(_AT_ONCE) as encoders:
        for batch in batches:
            waiting.append((batch, encoders.submit(encode, [piece.text for piece in batch])))
            if len(waiting) > _AT_ONCE:
                batch, ids = waiting.popleft()
                yield batch, ids.result()
        for batch, ids in waiting:
            yield batch, ids.result()


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
    if batch:
        yield batch


class _Stores:
    """Both splits while they are written, and what is counted on the way.

    Up to where the state of a killed process reaches, documents are only counted: their tokens are there.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, log: Log) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        state = _read_state(folder)
        self._written: int = state.get("documents", 0)
        self._writers = {s: ShardWriter(folder, s, tokenizer.vocab_size, state=state.get("splits", {}).get(s)) for s in SPLITS}
        self._lossless: bool | None = state.get("lossless")
        self._documents: Counter[Split] = Counter()
        self._zlib = zlib.compressobj(9)
        self._zlib_in = self._zlib_out = 0
        self._chars = 0  # since the last state
        if self._written:
            log(f"Going on after {self._written:,} documents that an earlier process has tokenised.")

    def unwritten(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The pieces that are not in the stores yet; the documents of all are counted, and those of the validation packed."""
        left = self._written
        for piece in pieces:
            if piece.split == "val" and piece.counted and self._zlib_in < _ZLIB_BYTES:
                data = piece.text.encode()
                self._zlib_in += len(data)
                self._zlib_out += len(self._zlib.compress(data))
            if left <= 0:
                yield piece
            left -= piece.ends
            self._documents[piece.split] += piece.ends

    def add(self, batch: list[Piece], ids: list[Ids]) -> None:
        """Writes."""
        for piece, found in zip(batch, ids, strict=True):
            self._note_loss(piece, found)
            self._write(piece, found)
            self._written += piece.ends
            self._chars += len(piece.text)
        if self._chars > _STATE_CHARS and batch[-1].ends:
            self._chars = 0
            self._save_state()

    def _note_loss(self, piece: Piece, ids: Ids) -> None:
        """Whether the first piece comes back from its ids, and no other one has something that the tokenizer does not know."""
        unknown = self._tokenizer.unknown
        if self._lossless is None:
            self._lossless = self._tokenizer.decode(ids.tolist()) == piece.text
        elif self._lossless and unknown is not None:
            self._lossless = not bool((ids == unknown).any())

    def _write(self, piece: Piece, ids: Ids) -> None:
        writer = self._writers[piece.split]
        if piece.starts:
            writer.start_document()
        if piece.part is not None:
            writer.start_part(piece.part)
        n_bytes = len(piece.text.encode()) if piece.counted else 0
        writer.add(np.concatenate([np.array(piece.head, np.uint32), ids, np.array(piece.tail, np.uint32)]), n_bytes)

    def _save_state(self) -> None:
        splits = {split: writer.save() for split, writer in self._writers.items()}
        state = {"documents": self._written, "splits": splits, "lossless": self._lossless}
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
            "documents": dict(self._documents),
            "lossless": self._lossless,
            "zlib": [self._zlib_in, zlib_bytes],
        }


def _read_state(folder: Path) -> Tree:
    """Empty where there is none."""
    try:
        return dict(json.loads((folder / _STATE).read_text()))
    except (OSError, ValueError):
        return {}
