"""Checkpoints in one neutral form for every strategy: blocks per parameter name and kind, an index of where they lie, and meta data.

Only safetensors and JSON. Each rank writes what it owns, and any number reads what it needs. Torch is imported for tensors alone.
"""

import math
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field
from safetensors import SafetensorError, safe_open

from lm.errors import CheckpointError, NumericsError
from lm.schema import Config, Tree
from lm.storage.atomic import discard, failpoint, write_json
from lm.storage.formats import FORMAT, current
from lm.storage.manifest import verify
from lm.storage.reading import checked, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

META = "meta.json"
_FILE = r"^rank-\d{5,}\.(weights|optimizer)\.safetensors$"
ALONE = (0, 1)  # the share of a piece that no other rank holds
WEIGHTS = ("weight", "ema")  # kinds of tensors that a model computes with; those of optimizers may hold infinity and go on

Count = Annotated[int, Field(ge=0)]
Shape = tuple[int, ...]
Block = tuple[Shape, Shape]  # offset and extent, in each dimension


@dataclass(frozen=True)
class Piece:
    """A block of a tensor that belongs to the parameter `name`: rows, columns, a tile of a mesh, or a range of it flattened.

    offset: where the block begins, in each dimension of the whole; or one number, and `tensor` is a range of the flattened whole.
    """

    name: str  # or that of answers, as an objective keeps them
    kind: str  # weight, exp_avg, exp_avg_sq, momentum, step, ema, iterate
    shape: Shape  # of the whole tensor
    offset: Shape
    tensor: "Tensor"
    share: tuple[int, int] | None = None  # this rank is the i-th of n that hold it; None: every rank does

    @classmethod
    def whole(cls, name: str, kind: str, tensor: "Tensor") -> Self:
        """Returns a whole tensor as a piece; a scalar becomes a range of one element."""
        dims = max(1, tensor.ndim)
        return cls(name, kind, tuple(tensor.shape), (0,) * dims, tensor.detach() if tensor.ndim else tensor.detach().reshape(1))

    def part(self, rank: int, world: int) -> Self:
        """Returns what this rank writes: all of a piece that it alone holds, else its share; whole tensors are shared in flat ranges."""
        rank, world = self.share or (rank, world)
        if world == 1:
            return self
        flat = self.tensor.shape == self.shape
        tensor = self.tensor.reshape(-1) if flat else self.tensor
        low, high = (len(tensor) * edge // world for edge in (rank, rank + 1))
        first, *others = (0,) if flat else self.offset
        return replace(self, offset=(first + low, *others), tensor=tensor[low:high])


class _Entry(Config):
    """Where the blocks of a tensor lie."""

    shape: list[Count]
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    pieces: list[tuple[Annotated[str, Field(pattern=_FILE)], str, list[Count], list[Count]]]
    """File, name therein, offset and extent."""


class _Index(Config):
    tensors: dict[str, dict[str, _Entry]]
    """By parameter and kind."""


@dataclass(frozen=True)
class _Part:
    """A block of a tensor within the piece that holds it.  at: the element of a flattened range where it begins; None: it is the piece."""

    offset: Shape
    extent: Shape
    at: int | None = None

    def take(self, piece: Any, block: Block) -> "Tensor":
        """Returns a block of this part.  piece: a tensor, or a tensor of an open file, of which no more than these rows are read."""
        places = tuple(slice(o - mine, o - mine + n) for o, n, mine in zip(*block, self.offset, strict=True))
        if self.at is None:
            found: Tensor = piece[places]
            return found
        inner, row = self.extent[1:], math.prod(self.extent[1:])
        rows: Tensor = piece[self.at + places[0].start * row : self.at + places[0].stop * row]
        return rows.view(-1, *inner)[(slice(None), *places[1:])]


def _parts(shape: Shape, offset: Shape, extent: Shape) -> list[_Part]:
    """Returns the blocks that make up a piece of a tensor of this shape. A piece that is a block is the only one. A range of the flattened
    tensor is cut into the end of a row, whole rows, and the beginning of a row; the two cut rows are divided in the same way."""
    if len(offset) == len(shape):
        return [_Part(offset, extent)]
    found, at = [], 0
    for where, size in _ranges(shape, offset[0], offset[0] + extent[0]):
        found.append(_Part(where, size, at))
        at += math.prod(size)
    return found


def _overlap(a: _Part, b: _Part) -> Block | None:
    low = tuple(map(max, a.offset, b.offset))
    high = (min(p + m, q + n) for p, m, q, n in zip(a.offset, a.extent, b.offset, b.extent, strict=True))
    extent = tuple(stop - start for start, stop in zip(low, high, strict=True))
    return (low, extent) if min(extent) > 0 else None


def _ranges(shape: Shape, start: int, stop: int) -> Iterator[Block]:
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner, row = shape[1:], math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _in_row(inner, last, start, stop)
        return
    yield from _in_row(inner, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    yield from _in_row(inner, last, last * row, stop)


def _in_row(inner: Shape, n: int, start: int, stop: int) -> Iterator[Block]:
    before = n * math.prod(inner)
    yield from (((n, *offset), (1, *extent)) for offset, extent in _ranges(inner, start - before, stop - before))


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Returns the step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """Returns the step folders, newest first, valid or not."""
    return sorted((path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)), key=step_of, reverse=True)


def bytes_of(pieces: Iterable[Piece]) -> int:
    """Returns the size of a checkpoint, but for a few kilobytes of index."""
    return sum(piece.tensor.nbytes for piece in pieces)


def write_pieces(folder: Path, pieces: Iterable[Piece], rank: int = 0) -> None:
    """Writes one rank's pieces, the weights in one file and the optimizer's tensors in another, and the index of both."""
    from safetensors.torch import save_file

    files: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}}
    index: Tree = {}
    for piece in pieces:
        group = "weights" if piece.kind == "weight" else "optimizer"
        key = f"{piece.name}/{piece.kind}/{','.join(map(str, piece.offset))}"
        tensor = piece.tensor.detach().contiguous().cpu()
        files[group][key] = tensor.clone() if tensor.numel() == 1 else tensor  # an engine's step counter has many names
        if piece.kind in WEIGHTS:
            require_finite(piece.name, tensor)
        empty = {"shape": list(piece.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "pieces": []}
        entry = index.setdefault(piece.name, {}).setdefault(piece.kind, empty)
        entry["pieces"].append([_file(rank, group), key, list(piece.offset), list(tensor.shape)])
    for group, tensors in files.items():
        save_file(tensors, folder / _file(rank, group))
        failpoint(group)
    write_json(folder / f"rank-{rank:05d}.json", index)


def _file(rank: int, group: str) -> str:
    return f"rank-{rank:05d}.{group}.safetensors"


def write_meta(folder: Path, meta: Tree) -> None:
    write_json(folder / META, {"format": FORMAT, **meta})


def read_meta(folder: Path) -> Tree:
    """Returns meta.json with today's keys. Raises CheckpointError where it is not of today's format."""
    return current(read_json(folder / META), folder / META)


def require_finite(name: str, tensor: "Tensor", where: str = "save", remedy: str = "Resume the last checkpoint") -> None:
    """Raises NumericsError for NaN or infinity: saved, such weights would push out the last good checkpoint; read, they are of no use."""
    if tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):  # a twentieth of the time that tensor.isfinite() takes
        raise NumericsError(f"{where}: the weight {name} holds NaN or infinity, and such weights are neither saved nor used. {remedy}.")


class CheckpointReader:
    """A checkpoint; raises CheckpointError where a file is missing or damaged."""

    def __init__(self, folder: Path, verified: bool = False) -> None:
        """verified: another rank has hashed every file already."""
        if not verified:
            verify(folder)
        self.folder = folder
        self._files: dict[str, Any] = {}
        self.meta = read_meta(folder)
        self._index: dict[str, dict[str, _Entry]] = {}
        for path in sorted(folder.glob("rank-*.json")):
            self._merge(checked(_Index, {"tensors": read_json(path)}, path))

    def _merge(self, index: _Index) -> None:
        for name, kinds in index.tensors.items():
            for kind, entry in kinds.items():
                known = self._index.setdefault(name, {}).setdefault(kind, entry)
                if known is not entry:
                    known.pieces.extend(entry.pieces)

    def close(self) -> None:
        """Lets go of the files, which count as memory, and on the disk even once they are removed. `read` opens them again."""
        self._files.clear()

    def names(self) -> list[str]:
        return [name for name, kinds in self._index.items() if "weight" in kinds]

    def kinds(self, name: str) -> list[str]:
        return list(self._index.get(name, {}))

    def shape(self, name: str, kind: str = "weight") -> tuple[int, ...]:
        return tuple(self._entry(name, kind).shape)

    def dtype(self, name: str, kind: str = "weight") -> "torch.dtype":
        import torch

        found: torch.dtype = getattr(torch, self._entry(name, kind).dtype)
        return found

    def read(self, name: str, kind: str = "weight", offset: Shape | None = None, extent: Shape | None = None) -> "Tensor":
        """Returns a tensor, or the block of it at `offset` (as in a Piece, a range of the flattened tensor too), in the saved dtype."""
        import torch

        entry = self._entry(name, kind)
        shape = tuple(entry.shape) or (1,)
        found = [(self._slice(piece, shape), _parts(shape, tuple(piece[2]), tuple(piece[3]))) for piece in entry.pieces]
        size = shape if extent is None else extent
        wanted = _parts(shape, (0,) * len(shape) if offset is None else offset, size)
        both = [(piece, a, b, block) for piece, parts in found for a in parts for b in wanted if (block := _overlap(a, b)) is not None]
        if sum(math.prod(block[1]) for *_, block in both) != math.prod(size):
            raise CheckpointError(f"{self.folder}: {kind} of {name} is only partly there. Use another checkpoint.")
        out = torch.empty(size, dtype=self.dtype(name, kind))
        for piece, here, there, block in both:
            there.take(out, block).copy_(here.take(piece, block))
        if kind in WEIGHTS:
            require_finite(name, out, str(self.folder), "Use an earlier checkpoint")
        return out if extent is not None else out.view(entry.shape)

    def _slice(self, piece: tuple[str, str, list[int], list[int]], shape: Shape) -> Any:
        """Returns a lazy tensor of an open file, which reads only what is taken. Raises CheckpointError where it has another shape."""
        file, key, offset, extent = piece
        try:
            opened = self._files[file] = self._files.get(file) or safe_open(self.folder / file, framework="pt")
            found = opened.get_slice(key)
        except (OSError, SafetensorError) as error:
            reason = str(error)[:200]
            raise CheckpointError(f"{self.folder / file}: {key[:80]} cannot be read ({reason}). Use another checkpoint.") from None
        flat = len(offset) == 1
        if list(found.get_shape()) != extent or len(offset) != len(extent) or not (flat or len(offset) == len(shape)):
            raise CheckpointError(f"{self.folder / file}: {key[:80]} has another shape than the index says. Use another checkpoint.")
        return found

    def _entry(self, name: str, kind: str) -> _Entry:
        try:
            return self._index[name][kind]
        except KeyError:
            raise CheckpointError(f"{self.folder}: there is no {kind} of {name}. Use a checkpoint of the same run.") from None


def newest_valid(folder: Path, most: float = math.inf, every: int = 1) -> tuple[Path | None, list[str]]:
    """Returns the newest checkpoint that verifies, of an `every`-th step up to `most`; and a sentence for each newer one that does not."""
    rejected: list[str] = []
    for path in (path for path in checkpoints(folder) if step_of(path) <= most and step_of(path) % every == 0):
        try:
            verify(path)
        except CheckpointError as error:
            rejected.append(str(error))
        else:
            return path, rejected
    return None, rejected


def prune(folder: Path, newest: Path, keep_last: int, keep_steps: Container[int] = ()) -> None:
    """Removes all checkpoints but the `keep_last` newest, counted from `newest`, which is known to be whole, and those of `keep_steps`."""
    known = checkpoints(folder)
    for path in [path for path in known[known.index(newest) + keep_last :] if step_of(path) not in keep_steps]:
        discard(path)
