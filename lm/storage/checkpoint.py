"""Checkpoints in one neutral form for every strategy: flat slices per parameter name and kind, an index of where they lie, and meta data.

Only safetensors and JSON. Each rank writes the slices that it owns, and any number of ranks reads what it needs.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lm.config import Tree
from lm.errors import CheckpointError, NumericsError
from lm.storage.atomic import atomic_folder, discard, failpoint, verify, write_json
from lm.storage.formats import FORMAT, current
from lm.storage.reading import read_json

META = "meta.json"


@dataclass(frozen=True)
class Piece:
    """Elements start..stop of one flattened tensor, which belongs to the parameter `name`."""

    name: str
    kind: str  # weight, exp_avg, exp_avg_sq, momentum, step, ema
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    tensor: Tensor
    shared: bool = True  # every rank holds it; otherwise this rank alone

    @classmethod
    def whole(cls, name: str, kind: str, tensor: Tensor) -> Self:
        return cls(name, kind, tuple(tensor.shape), 0, tensor.numel(), tensor.detach())

    def part(self, rank: int, world: int) -> Self:
        """What this rank writes: all of a slice that it alone holds, else its share."""
        if not self.shared or world == 1:
            return self
        low, high = (self.tensor.numel() * edge // world for edge in (rank, rank + 1))
        return replace(self, start=self.start + low, stop=self.start + high, tensor=self.tensor.reshape(-1)[low:high])


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """The step folders, newest first, valid or not."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := re.fullmatch(r"step-(\d+)", path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def bytes_of(pieces: Iterable[Piece]) -> int:
    """Size of a checkpoint, but for a few kilobytes of index."""
    return sum(piece.tensor.nbytes for piece in pieces)


def save_checkpoint(folder: Path, pieces: Iterable[Piece], meta: Tree, save_tokenizer: Callable[[Path], None] | None = None) -> None:
    """The whole checkpoint from one process; `lm.training.callbacks.saving` does it from many."""
    pieces = list(pieces)
    with atomic_folder(folder, bytes_of(pieces)) as temporary:
        write_pieces(temporary, pieces)
        write_meta(temporary, meta)
        if save_tokenizer is not None:
            save_tokenizer(temporary)


def write_pieces(folder: Path, pieces: Iterable[Piece], rank: int = 0) -> None:
    """One rank's slices, the weights in one file and the optimizer's tensors in another, and the index of both."""
    files: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}}
    index: Tree = {}
    for piece in pieces:
        group = "weights" if piece.kind == "weight" else "optimizer"
        key = f"{piece.name}/{piece.kind}/{piece.start}"
        tensor = piece.tensor.detach().reshape(-1).contiguous().cpu()
        files[group][key] = tensor.clone() if tensor.numel() == 1 else tensor  # an engine's step counter has many names
        if group == "weights":
            require_finite(piece.name, tensor)
        empty = {"shape": list(piece.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "pieces": []}
        entry = index.setdefault(piece.name, {}).setdefault(piece.kind, empty)
        entry["pieces"].append([_file(rank, group), key, piece.start, piece.stop])
    for group, tensors in files.items():
        save_file(tensors, folder / _file(rank, group))
        failpoint(group)
    write_json(folder / f"rank-{rank:05d}.json", index)


def _file(rank: int, group: str) -> str:
    return f"rank-{rank:05d}.{group}.safetensors"


def write_meta(folder: Path, meta: Tree) -> None:
    write_json(folder / META, {"format": FORMAT, **meta})


def read_meta(folder: Path) -> Tree:
    """In today's format, whichever it was written in."""
    return current(read_json(folder / META), folder / META)


def require_finite(name: str, tensor: Tensor) -> None:
    """A checkpoint of broken weights would push out the last good one."""
    if not torch.isfinite(tensor).all():
        raise NumericsError(f"save: the weight {name} holds NaN or infinity, and such weights are never saved. Resume the last checkpoint.")


class CheckpointReader:
    """A checkpoint; raises CheckpointError where a file is missing or damaged."""

    def __init__(self, folder: Path, verified: bool = False) -> None:
        """verified: another rank has hashed every file already."""
        if not verified:
            verify(folder)
        self.folder = folder
        self._files: dict[str, Any] = {}
        self.meta = read_meta(folder)
        self._index: dict[str, dict[str, Tree]] = {}
        for path in sorted(folder.glob("rank-*.json")):
            self._merge(read_json(path))

    def _merge(self, index: Tree) -> None:
        for name, kinds in index.items():
            for kind, entry in kinds.items():
                known = self._index.setdefault(name, {}).setdefault(kind, {**entry, "pieces": []})
                known["pieces"] += entry["pieces"]

    def names(self) -> list[str]:
        return list(self._index)

    def kinds(self, name: str) -> list[str]:
        return list(self._index.get(name, {}))

    def shape(self, name: str, kind: str = "weight") -> tuple[int, ...]:
        return tuple(self._entry(name, kind)["shape"])

    def dtype(self, name: str, kind: str = "weight") -> torch.dtype:
        found: torch.dtype = getattr(torch, self._entry(name, kind)["dtype"])
        return found

    def read(self, name: str, kind: str = "weight", start: int = 0, stop: int | None = None) -> Tensor:
        """Elements start..stop of the flattened tensor, in the dtype that was saved."""
        entry = self._entry(name, kind)
        stop = math.prod(entry["shape"]) if stop is None else stop
        out = torch.empty(stop - start, dtype=self.dtype(name, kind))
        filled = 0
        for file, key, first, last in entry["pieces"]:
            low, high = max(start, first), min(stop, last)
            if low < high:
                out[low - start : high - start] = self._open(file).get_slice(key)[low - first : high - first]
                filled += high - low
        if filled != stop - start:
            raise CheckpointError(f"{self.folder}: {kind} of {name} is only partly there. Use another checkpoint.")
        return out

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, framework="pt")
        return self._files[file]

    def _entry(self, name: str, kind: str) -> Tree:
        try:
            return self._index[name][kind]
        except KeyError:
            raise CheckpointError(f"{self.folder}: there is no {kind} of {name}. Use a checkpoint of the same run.") from None


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and a sentence for each newer one that does not."""
    rejected: list[str] = []
    for path in checkpoints(folder):
        try:
            verify(path)
        except CheckpointError as error:
            rejected.append(str(error))
        else:
            return path, rejected
    return None, rejected


def prune(folder: Path, keep_last: int) -> None:
    """Remove all but the `keep_last` newest, counted from the newest that verifies; without one, nothing is removed."""
    valid, rejected = newest_valid(folder)
    if valid is not None:
        for path in checkpoints(folder)[len(rejected) + keep_last :]:
            discard(path)
