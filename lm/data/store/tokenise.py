"""From documents to token stores on disk: encodes on all cores while reading and writing, and can be resumed after a kill."""

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm.data.records.base import Passage
from lm.data.sources.base import SPLITS, Source, Split
from lm.data.store.cache import Log
from lm.data.store.shards import ShardWriter
from lm.data.store.squeezed import Squeezed
from lm.data.tokenizer.tiktoken_ import Encode, fastest
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.progress import progress
from lm.schema import Tree
from lm.storage.atomic import replace_file, sync
from lm.units import counted

Ids = NDArray[np.uint32]
_BATCH_CHARS = 1 << 21
_STATE_CHARS = 1 << 26  # characters between two saved states
_STATE = "state.json"
_TRIED = 200  # decoded are the beginnings of so many first documents, and after that of one in so many
_TRIED_CHARS = 1 << 12
_AT_ONCE = 2  # batches encoded at the same time


def tokenise(source: Source, passages: Iterable[Passage], tokenizer: Tokenizer, folder: Path, log: Log, keep: bool = False) -> Tree:
    """Writes all splits into `folder`, resuming from a killed process's state, and returns their part of index.json.

    passages: of all documents of the source.  source: asked for its progress, and whether its files are unchanged.
    keep: keep validation text as `Squeezed` does.
    """
    stores = _Stores(folder, tokenizer, log, keep)
    with progress("Tokenising", source.total) as done:
        for batch, ids in _encoded(_batches(stores.unwritten(passages)), fastest(tokenizer)):
            if stores.add(batch, ids) and source.untouched():
                stores.save_state()
            done(source.position())
    source.confirm()
    if source.first_fault:
        log(f"records: the first that is left out: {source.first_fault}")
    return {**stores.close(), "skipped": source.skipped, "forms": sorted(source.forms), "unread": sorted(source.unread)}


def _encoded(batches: Iterable[list[Passage]], encode: Encode) -> Iterator[tuple[list[Passage], list[Ids]]]:
    """Yields each batch with the ids of its passages, while the next batches are read and encoded.

    Two batches are encoded at once, since towards the end of a batch some cores are idle.
    """
    waiting: deque[tuple[list[Passage], Future[list[Ids]]]] = deque()
    with ThreadPoolExecutor(_AT_ONCE) as encoders:
        for batch in batches:
            waiting.append((batch, encoders.submit(_ids_of, batch, encode)))
            if len(waiting) > _AT_ONCE:
                batch, ids = waiting.popleft()
                yield batch, ids.result()
        for batch, ids in waiting:
            yield batch, ids.result()


def _ids_of(batch: list[Passage], encode: Encode) -> list[Ids]:
    found = iter(encode([passage.text for passage in batch if passage.ids is None]))
    return [next(found) if passage.ids is None else passage.ids.astype(np.uint32) for passage in batch]


def _batches(passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    """Yields batches of passages to encode at once; the number of characters bounds the memory."""
    batch: list[Passage] = []
    chars = 0
    for passage in passages:
        batch.append(passage)
        chars += len(passage.text)
        if chars > _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


class _Stores:
    """The stores of all splits while they are written, and counts of what was read.

    Documents up to the state of a killed process are only counted: their tokens are stored already.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, log: Log, keep: bool) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        state = _read_state(folder)
        self._written: int = state.get("documents", 0)
        self._writers = {s: ShardWriter(folder, s, tokenizer.vocab_size, state=state.get("splits", {}).get(s)) for s in SPLITS}
        self._lossless: bool | None = state.get("lossless")
        self._documents: Counter[Split] = Counter()
        self._squeezed = Squeezed(folder if keep else None)
        self._chars = 0  # since the last saved state
        if self._written:
            log(f"Going on after {counted(self._written, 'document')} that an earlier process has tokenised.")

    def unwritten(self, passages: Iterable[Passage]) -> Iterator[Passage]:
        """Yields the passages that are not stored yet. Counts all documents, and compresses validation text for zlib_bits_per_byte."""
        left = self._written
        for passage in passages:
            if passage.split == "val" and passage.counted:
                self._squeezed.add(passage.text)
            if left <= 0:
                yield passage
            left -= passage.ends
            self._documents[passage.split] += passage.ends

    def add(self, batch: list[Passage], ids: list[Ids]) -> bool:
        """Writes a batch, and returns whether a state should be saved now."""
        for passage, found in zip(batch, ids, strict=True):
            self._note_loss(passage, found)
            self._write(passage, found)
            self._written += passage.ends
            self._chars += len(passage.text)
        return self._chars > _STATE_CHARS and batch[-1].ends

    def _note_loss(self, passage: Passage, ids: Ids) -> None:
        """Records whether tokens are lossless: decoding gives passages back, of which a sample is tried, and none has unknown tokens."""
        unknown = self._tokenizer.unknown
        if self._lossless is None or (self._lossless and (self._written < _TRIED or self._written % _TRIED == 0)):
            text = passage.text[:_TRIED_CHARS]
            self._lossless = self._tokenizer.decode(self._tokenizer.encode(text)) == text
        if self._lossless and unknown is not None and passage.ids is None:
            self._lossless = not bool((ids == unknown).any())

    def _write(self, passage: Passage, ids: Ids) -> None:
        writer = self._writers[passage.split]
        if passage.starts:
            writer.start_document()
        if passage.part is not None:
            writer.start_part(passage.part)
        n_bytes = len(passage.text.encode()) if passage.counted else 0
        writer.add(np.concatenate([np.array(passage.head, np.uint32), ids, np.array(passage.tail, np.uint32)]), n_bytes)

    def save_state(self) -> None:
        """Saves the state from which a later process resumes."""
        self._chars = 0
        splits = {split: writer.save() for split, writer in self._writers.items()}
        for file in self._folder.iterdir():
            sync(file)  # else, after a power cut, the state may count what is not on the disk
        state = {"documents": self._written, "splits": splits, "lossless": self._lossless}
        replace_file(self._folder / _STATE, json.dumps(state))

    def close(self) -> Tree:
        """Ends all stores, and returns their part of index.json. The state is kept, for a kill before that is written."""
        splits = {split: writer.close(keep=True) for split, writer in self._writers.items()}
        return {"splits": splits, "documents": dict(self._documents), "lossless": self._lossless, **self._squeezed.close()}


def remove_state(folder: Path) -> None:
    """Removes the saved state, when all tokens are made and index.json tells of them."""
    (folder / _STATE).unlink(missing_ok=True)
    for file in folder.glob("*.half"):  # only now: the state counts what is in them
        file.unlink()


def _read_state(folder: Path) -> Tree:
    """Returns the saved state; {} where there is none."""
    try:
        return dict(json.loads((folder / _STATE).read_text()))
    except (OSError, ValueError):
        return {}
