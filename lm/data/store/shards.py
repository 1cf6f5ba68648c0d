"""Token streams on disk: little-endian uint16 or uint32 shards, memory-mapped, with the documents' starts and an index.json."""

import hashlib
import json
import mmap
import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.sources.base import Split
from lm.data.store.faults import damaged, unreadable
from lm.data.store.shared import brought, may_come
from lm.schema import Tree
from lm.storage.atomic import replace_file

_SHARD_TOKENS = 1 << 28
_WRITE_TOKENS = 1 << 20
_BLOCK = 1 << 16  # tokens per checksum
_SAMPLED = 6  # random blocks of a shard that are checked, beside its first and its last
_ITEM: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
Tokens = NDArray[Any]


class ShardWriter:
    """Appends one split's documents; `close` returns the split's part of the index.

    state: return value of `save` in a process that was killed later; everything which that process wrote after it is cut off.
    """

    def __init__(self, folder: Path, split: Split, vocab_size: int, shard_tokens: int = _SHARD_TOKENS, state: Tree | None = None) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self.dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        state = state or {"shards": [], "n_tokens": 0, "n_bytes": 0, "starts": 0, "parts": 0}
        self._shards: list[Tree] = state["shards"]
        self.n_tokens: int = state["n_tokens"]
        self.n_bytes: int = state["n_bytes"]
        self._starts = _Numbers(folder / f"{split}.documents.half", state["starts"])
        self._parts = _Numbers(folder / f"{split}.parts.half", state["parts"])
        self._hash = hashlib.sha256()
        self._pending: list[Tokens] = []
        self._n_pending = 0
        self._reread()

    def start_document(self) -> None:
        """Marks the next token as the beginning of a document."""
        self._starts.add(self.n_tokens)

    def start_part(self, kind: int) -> None:
        """Marks the next token as the beginning of a part of its document."""
        self._parts.add(self.n_tokens, kind)

    def starts_at(self, documents: NDArray[np.int64], parts: NDArray[np.int64]) -> None:
        """Marks where documents and parts begin in the tokens to come, counted from the next token.  parts: (parts, 2), start and kind."""
        self._starts.add(*(documents + self.n_tokens).tolist())
        self._parts.add(*(parts + np.array([self.n_tokens, 0])).ravel().tolist())

    def add(self, tokens: Tokens, n_bytes: int = 0) -> None:
        """Appends tokens of the current document.  n_bytes: UTF-8 bytes of their text."""
        self._pending.append(tokens.astype(_ITEM[self.dtype]))
        self._n_pending += len(tokens)
        self.n_tokens += len(tokens)
        self.n_bytes += n_bytes
        if self._n_pending >= _WRITE_TOKENS:
            self._write()

    def save(self) -> Tree:
        """Writes everything so far into the files, and returns the state from which another process can go on."""
        self._write()
        starts, parts = self._starts.write(), self._parts.write()
        return {"shards": self._shards, "n_tokens": self.n_tokens, "n_bytes": self.n_bytes, "starts": starts, "parts": parts}

    def close(self, keep: bool = False) -> Tree:
        """Writes the starts of documents and parts, and returns the split's index entry; its `sha256` covers tokens and starts.

        keep: leaves the files from which another process can go on.
        """
        self._write()
        self._end_shard()
        starts, parts = self._starts.close(keep), self._parts.close(keep).reshape(-1, 2)
        found: Tree = {"dtype": self.dtype, "n_tokens": self.n_tokens, "n_documents": len(starts), "n_bytes": self.n_bytes}
        found["crc32"] = {"documents": self._save("documents", starts)}
        if len(parts):
            found |= {"n_parts": len(parts)}
            found["crc32"]["parts"] = self._save("parts", parts)
        return {**found, "sha256": self._hash.hexdigest(), "shards": self._shards}

    def _save(self, name: str, numbers: NDArray[np.int64]) -> str:
        """Writes an array as a .npy file, and returns the file's checksums."""
        file = self._folder / f"{self._split}.{name}.npy"
        np.save(file, numbers)
        self._hash.update(numbers.tobytes())
        return _checksums(file, numbers.itemsize)

    def _write(self) -> None:
        data = np.concatenate(self._pending) if self._pending else np.array([], _ITEM[self.dtype])
        self._pending, self._n_pending = [], 0
        self._hash.update(data.tobytes())
        while len(data):
            if not self._shards or self._shards[-1]["n_tokens"] == self._shard_tokens:
                self._end_shard()
                self._shards.append({"file": f"{self._split}-{len(self._shards):05d}.bin", "n_tokens": 0})
            shard = self._shards[-1]
            part, data = np.split(data, [self._shard_tokens - shard["n_tokens"]])
            with (self._folder / shard["file"]).open("ab") as stream:
                stream.write(part)
            shard["n_tokens"] += len(part)

    def _end_shard(self) -> None:
        if self._shards:
            self._shards[-1]["crc32"] = _checksums(self._folder / self._shards[-1]["file"], _ITEM[self.dtype].itemsize)

    def _reread(self) -> None:
        """Cuts off everything after the state, and hashes the rest."""
        for file in self._folder.glob(f"{self._split}-*.bin"):
            if file.name not in {shard["file"] for shard in self._shards}:
                file.unlink()
        for shard in self._shards:
            path = self._folder / shard["file"]
            os.truncate(path, shard["n_tokens"] * _ITEM[self.dtype].itemsize)
            with path.open("rb") as stream:
                while data := stream.read(1 << 24):
                    self._hash.update(data)


class _Numbers:
    """Numbers appended to a temporary file; `close` reads them all, and removes the file unless it is to be kept."""

    def __init__(self, file: Path, count: int) -> None:
        self._file, self._new = file, array("q")
        file.touch()
        os.truncate(file, count * self._new.itemsize)

    def add(self, *numbers: int) -> None:
        """Appends numbers."""
        self._new.extend(numbers)

    def write(self) -> int:
        """Writes to the file; returns how many numbers it holds."""
        with self._file.open("ab") as stream:
            self._new.tofile(stream)
            self._new = array("q")
            return stream.tell() // self._new.itemsize

    def close(self, keep: bool) -> NDArray[np.int64]:
        """Returns all numbers."""
        self.write()
        found = np.fromfile(self._file, "<i8")
        if not keep:
            self._file.unlink()
        return found


class TokenStore:
    """One split, read as a single stream of tokens.

    parts: (parts, 2) start and kind of each part of a record; empty where records are plain texts.
    Raises ConfigError naming a file that is missing or has another size than the index says. Where the folder is kept at a URL, a shard is
    fetched when it is first read, which may raise ResourceError too.
    """

    def __init__(self, folder: Path, split: Split) -> None:
        index = read_index(folder)["splits"][split]
        self.folder, self.split = folder, split
        self.n_tokens: int = index["n_tokens"]
        self.n_documents: int = index["n_documents"]
        self.n_bytes: int = index["n_bytes"]
        self.sha256: str = index["sha256"]
        self._item = _ITEM[index["dtype"]]
        self._checksums = [shard["crc32"] for shard in index["shards"]]
        self._files = [folder / shard["file"] for shard in index["shards"]]
        self._lengths = [shard["n_tokens"] for shard in index["shards"]]
        self._ends = np.cumsum(self._lengths).tolist()
        self._maps: dict[int, mmap.mmap] = {}
        self._shards: dict[int, Tokens] = {}
        for number, file in enumerate(self._files):
            if file.exists() or not may_come(folder):
                self._shard(number)
        self.starts = self._numbers("documents", (self.n_documents,), index)
        n_parts = index.get("n_parts", 0)
        self.parts = self._numbers("parts", (n_parts, 2), index) if n_parts else np.empty((0, 2), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the folder and split: a loader process maps the files itself."""
        return TokenStore, (self.folder, self.split)

    def read(self, start: int, stop: int) -> Tokens:
        """Returns tokens start..stop-1, without a copy where one shard holds them all."""
        first = min(bisect_right(self._ends, start), len(self._files) - 1)
        begin, end = self._ends[first] - self._lengths[first], self._ends[first]
        part = self._shard(first)[start - begin : stop - begin]
        if end >= stop or first + 1 == len(self._files):
            return part
        return np.concatenate([part, self.read(end, stop)])

    def release(self) -> None:
        """Releases the mapped memory that was read; after a pass over all shards it would all count as memory of this process."""
        for shard in self._maps.values():
            shard.madvise(mmap.MADV_DONTNEED)

    def sample(self, vocab_size: int, seed: int) -> None:
        """Checks the first and the last block, and six that the seed picks, of each shard on this machine. Raises as `checked` does."""
        counts = {number: -(-len(shard) // _BLOCK) for number, shard in self._shards.items()}
        draws = {number: np.random.default_rng([seed, number]).integers(n, size=_SAMPLED).tolist() for number, n in counts.items()}
        picked = [(number, block) for number, n in counts.items() for block in {0, n - 1, *draws[number]}]
        for number, block in picked:  # prefetched together: a remote disk answers many requests as fast as one
            size = _BLOCK * self._item.itemsize
            at = block * size // mmap.PAGESIZE * mmap.PAGESIZE
            self._maps[number].madvise(mmap.MADV_WILLNEED, at, min(size, len(self._maps[number]) - at))
        for number, block in picked:
            self._block(number, block, vocab_size)
        self.release()

    def verify(self, vocab_size: int) -> None:
        """Checks all tokens, and the starts of documents and parts. Raises as `checked` does."""
        found = hashlib.sha256()
        for tokens in self.checked(vocab_size):
            found.update(tokens.data)
        for starts in (self.starts, self.parts):
            found.update(starts.tobytes())
        if found.hexdigest() != self.sha256:
            raise damaged(self.folder / f"{self.split}.documents.npy", "has another checksum than the index says")

    def checked(self, vocab_size: int) -> Iterator[Tokens]:
        """Yields the tokens in blocks. Raises ConfigError naming the shard with an id that the vocabulary lacks, or with another checksum
        than the index says."""
        for number, length in enumerate(self._lengths):
            for block in range(-(-length // _BLOCK)):
                yield self._block(number, block, vocab_size)
                self._maps[number].madvise(mmap.MADV_DONTNEED)

    def _shard(self, number: int) -> Tokens:
        if number not in self._shards:
            file = _brought(self._files[number], self._checksums[number], self._item.itemsize)
            self._maps[number] = _mapped(file, self._item, self._lengths[number])
            self._shards[number] = np.frombuffer(self._maps[number], self._item)
        return self._shards[number]

    def _numbers(self, name: str, shape: tuple[int, ...], index: Tree) -> NDArray[np.int64]:
        file = self.folder / f"{self.split}.{name}.npy"
        return _array(_brought(file, index["crc32"][name], 8), shape)

    def _block(self, shard: int, block: int, vocab_size: int) -> Tokens:
        tokens: Tokens = self._shard(shard)[block * _BLOCK : (block + 1) * _BLOCK]
        if (highest := int(tokens.max())) >= vocab_size:
            raise damaged(self._files[shard], f"holds token id {highest}, and the vocabulary has {vocab_size} ids")
        if f"{zlib.crc32(tokens.data):08x}" != self._checksums[shard][8 * block : 8 * block + 8]:
            raise damaged(self._files[shard], "has another checksum than the index says")
        return tokens


def write_index(folder: Path, index: Tree) -> None:
    """Writes index.json: `splits` and what else describes them. It must be written last."""
    replace_file(folder / "index.json", json.dumps({"format": 1, **index}, indent=1) + "\n")


def read_index(folder: Path) -> Tree:
    """Returns the content of index.json. Raises ConfigError where it cannot be read."""
    try:
        return dict(json.loads((folder / "index.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise unreadable(folder / "index.json", error) from None


def _brought(file: Path, checksums: str, item: int) -> Path:
    return brought(file, lambda copy: _checksums(copy, item) == checksums)


def _checksums(file: Path, item: int) -> str:
    """Returns the CRC-32 of each block of a file, eight digits each.  item: bytes of an item; a block has _BLOCK items."""
    with file.open("rb") as stream:
        return "".join(f"{zlib.crc32(block):08x}" for block in iter(lambda: stream.read(_BLOCK * item), b""))


def _mapped(file: Path, item: np.dtype[Any], n_tokens: int) -> mmap.mmap:
    try:
        size = file.stat().st_size if file.is_file() else None
        if size == n_tokens * item.itemsize:
            with file.open("rb") as stream:
                return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise unreadable(file, error) from None
    fault = "is missing" if size is None else f"has {size:,} bytes, and the index says {n_tokens * item.itemsize:,}"
    raise damaged(file, fault)


def _array(file: Path, shape: tuple[int, ...]) -> NDArray[np.int64]:
    try:
        found: NDArray[np.int64] = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise unreadable(file, error) from None
    if found.shape != shape or found.dtype != np.dtype("<i8"):
        raise damaged(file, f"holds an array of {found.shape}, and the index says {shape}")
    return found
