"""Writes checkpoints from all ranks of a run into one folder, in the step loop or in a background thread."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from lm.errors import ResourceError
from lm.schema import Tree
from lm.storage.atomic import atomic_folder, beside, disk_errors, require_space
from lm.storage.checkpoint import WEIGHTS, Piece, bytes_of, prune, read_meta, require_finite, step_folder, step_of, write_meta, write_pieces
from lm.training.launch.ranks import PeerLost, Ranks
from lm.training.run_config import CheckpointConfig

_PATIENCE_S = 60.0  # for a save that other ranks take part in


class Saver:
    """Writes each rank's slices into the folder of a step and publishes it when all ranks have written.

    keep_due: keep the last checkpoint on schedule, too, which a rollback goes to, and the one that was the best then, also behind many that
    a signal or an end has made.
    With checkpoint.background the step loop waits only for a copy of the slices in memory and, if the previous save still runs, for that.
    """

    def __init__(
        self, folder: Path, cfg: CheckpointConfig, ranks: Ranks, save_tokenizer: Callable[[Path], None], keep_due: bool = False
    ) -> None:
        self._folder, self._cfg, self._save_tokenizer, self._keep_due = folder, cfg, save_tokenizer, keep_due
        self._ranks = ranks
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def rehearse(self, pieces: Iterable[Piece], meta: Tree, n: int) -> None:
        """Tries what n saves and the final model need, in a folder that is removed again: file names, a file of the largest size, disk
        space for all, and that all ranks write into one folder. Raises ResourceError."""
        own_weights = own_others = 0  # bytes of this rank's weights and of its other tensors: one file each
        for piece in pieces:
            part = piece.part(self._ranks.rank, self._ranks.world)
            if part.kind == "weight":
                own_weights += part.tensor.nbytes
            else:
                own_others += 4 * part.tensor.numel()
        weights, others = self._ranks.total(own_weights, own_others)
        (largest,) = self._ranks.most(max(own_weights, own_others))
        if not self._ranks.first:
            self._require_shared(self._ranks.from_first(Path))
            return
        with disk_errors(self._folder, int(largest)), beside(self._folder / "trial", Path.mkdir) as trial:
            write_meta(trial, meta)
            self._save_tokenizer(trial)
            with (trial / "largest").open("wb") as file:
                file.truncate(int(largest))  # takes no space, but is refused where a file of this size would be
            require_space(self._folder, n * int(weights + others) + int(weights))
            self._require_shared(self._ranks.from_first(lambda: trial))

    def _require_shared(self, trial: Path) -> None:
        """Raises ResourceError on all ranks where one of them cannot write into the folder that the first has made."""
        fault = ""
        try:
            (trial / f"rank-{self._ranks.rank}").touch()
        except OSError as error:
            fault = f"rank {self._ranks.rank} on host {socket.gethostname()} cannot write there ({error.strerror})"
        for said in filter(None, self._ranks.each(fault)):
            rule = "and every rank writes its part of a checkpoint into one folder"
            raise ResourceError(f"{self._folder}: {said}, {rule}. Set run.dir to a disk that all machines share.")

    def save(self, step: int, pieces: Iterable[Piece], meta: Tree) -> None:
        """Saves a checkpoint, or starts to in the background. Raises the error of this save or of the previous background save."""
        self.wait()
        mine = [neutral for piece in pieces if (neutral := self._mine(piece)).tensor.numel()]
        if not self._cfg.background:
            self._write(step, mine, meta)
            return
        for piece in mine:
            if piece.kind in WEIGHTS:
                require_finite(piece.name, piece.tensor)
        self._writer = threading.Thread(target=self._write_and_note, args=(step, mine, meta), name="checkpoint")
        self._writer.start()

    def _mine(self, piece: Piece) -> Piece:
        """Returns this rank's part of a piece to write, in host memory; everything but weights is float32, or float64. The cast happens on
        the host, so that it takes no device memory."""
        part = piece.part(self._ranks.rank, self._ranks.world)
        dtype = part.tensor.dtype if part.kind == "weight" or part.tensor.dtype == torch.float64 else torch.float32
        return replace(part, tensor=part.tensor.detach().to("cpu", dtype, copy=self._cfg.background))

    def wait(self) -> None:
        """Waits until the running background save is complete; raises its error."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def end(self) -> None:
        """Lets the running background save complete where an error ends the run; an error of its own is dropped for that one. Other ranks,
        which take part in it, may be gone, so that with several this waits a minute at most."""
        if self._writer is not None:
            self._writer.join(None if self._ranks.world == 1 else _PATIENCE_S)

    def _write_and_note(self, step: int, pieces: list[Piece], meta: Tree) -> None:
        try:
            self._write(step, pieces, meta)
        except BaseException as error:
            self._error = error

    def _write(self, step: int, pieces: list[Piece], meta: Tree) -> None:
        path, ranks = step_folder(self._folder, step), self._ranks
        (needed,) = ranks.total(bytes_of(pieces))
        if ranks.first:
            with atomic_folder(path, int(needed)) as temporary:
                ranks.from_first(lambda: temporary)
                with self._until_all():
                    write_pieces(temporary, pieces)
                    write_meta(temporary, meta)
                    self._save_tokenizer(temporary)
            with disk_errors(self._folder):
                best = meta.get("counters", {}).get("best_step")
                due = _with_best(step_folder(self._folder, step - step % self._cfg.every)) if self._keep_due else []
                prune(self._folder, path, self._cfg.keep_last, [*self._cfg.keep_steps, best, *due])
        else:
            temporary = ranks.from_first(Path)  # the folder that the first rank has made
            with disk_errors(path), self._until_all():
                write_pieces(temporary, pieces, ranks.rank)
        ranks.barrier()  # it is a checkpoint

    @contextmanager
    def _until_all(self) -> Iterator[None]:
        """Ends when all ranks have written or failed: the first one, where it fails, removes the folder in which the others write. Raises
        this rank's own error, else PeerLost where another one has failed."""
        fault: Exception | None = None
        try:
            yield
        except Exception as error:
            fault = error
        (failed,) = self._ranks.total(fault is not None)
        if fault is not None:
            raise fault
        if failed:
            raise PeerLost("save: another rank could not write its part of the checkpoint. Its own error says why.")


def _with_best(checkpoint: Path) -> list[int]:
    """Returns the step of a checkpoint and that of the best one when it was saved; [] where it is not there."""
    if not checkpoint.exists():
        return []
    best = (read_meta(checkpoint).get("counters") or {}).get("best_step")
    return [step_of(checkpoint), *([best] if isinstance(best, int) else [])]
