"""Micro-batches of the steps of a run. The order has no state, so any step can be the first, with any number of ranks and workers."""

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from lm.data.rows.base import Rows
from lm.errors import ConfigError, LmError, ResourceError
from lm.nn.batch import IGNORED, Batch


def split(global_batch: int, world: int, micro_batch: int) -> tuple[int, int]:
    """(rows per micro-batch, micro-batches per step) of one rank: the most rows up to `micro_batch` that divide its part of the step."""
    if global_batch % world:
        raise ConfigError(
            f"data.global_batch={global_batch} is not a multiple of the {world} ranks. Choose a multiple of {world}, or other devices."
        )
    rows = global_batch // world
    size = next(size for size in range(min(rows, micro_batch), 0, -1) if rows % size == 0)
    return size, rows // size


def train_loader(
    rows: Rows,
    *,
    seed: int,
    global_batch: int,
    micro_batch: int,
    rank: int,
    world: int,
    start_step: int,
    max_steps: int,
    workers: int,
    train_rows: int | None = None,
    widest_first: bool = False,
    pinned: bool = False,
) -> "TrainLoader":
    """One rank's micro-batches of the steps start_step..max_steps-1, each with the label tokens of this rank's whole step.

    train_rows: only the first so many rows are read, again and again.
    widest_first: the first micro-batch of each step is as wide as any can be, whatever its rows should have been.
    pinned: batches lie in memory from which a GPU copies without the host's waiting.
    """
    size, accumulation = split(global_batch, world, micro_batch)
    steps = Steps(rows, seed, global_batch, size, rank, world, train_rows, widest_first)
    return TrainLoader(steps, range(start_step, max_steps), accumulation, workers, pinned)


def eval_batches(rows: Rows, ids: NDArray[np.int64], micro_batch: int) -> Iterator[Batch]:
    """The rows in this order, the last batch as short as it comes."""
    for part in _parts(ids, micro_batch):
        yield from _counted([rows.batch(part)])


class TrainLoader(Sized):
    """Micro-batches, flat; `len` is how many. Can be iterated again, from the first step. Use inside `worker_faults`."""

    def __init__(self, steps: "Steps", order: range, accumulation: int, workers: int, pinned: bool) -> None:
        start = _leave_signals_to_the_run if workers else None
        self._steps = DataLoader(
            steps, batch_size=None, sampler=order, num_workers=workers, collate_fn=_as_is, worker_init_fn=start, pin_memory=pinned
        )
        self._length = min(len(order) * accumulation, sys.maxsize)  # which is all that len() can tell

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        others = multiprocessing.active_children()
        steps = iter(self._steps)
        workers = [child for child in multiprocessing.active_children() if child not in others]
        while (step := _handed_over(steps, workers)) is not None:
            yield from step


@contextmanager
def worker_faults() -> Iterator[None]:
    """Turns the death of a loader process into a ResourceError. Torch raises it from a signal handler, so at any place of the training."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ResourceError(f"data.workers: {str(error).splitlines()[0]} Start again, or set data.workers=0.") from None


@dataclass(frozen=True)
class Steps(Dataset[list[Batch]]):
    """Item `step` is the list of this rank's micro-batches."""

    rows: Rows
    seed: int
    global_batch: int
    micro_batch: int
    rank: int
    world: int
    train_rows: int | None
    widest_first: bool

    def __getitem__(self, step: int) -> list[Batch]:
        per_rank = self.global_batch // self.world
        ids = self.rows.of_step(self.seed, step, self.global_batch, self.train_rows)[self.rank * per_rank : (self.rank + 1) * per_rank]
        parts = list(_parts(ids, self.micro_batch))
        if self.widest_first:
            parts[0] = self.rows.widest(len(parts[0]))
        return _counted([self.rows.batch(part, step) for part in parts])


def _counted(batches: list[Batch]) -> list[Batch]:
    """The batches of one step, each told the label tokens of all, or what else their rows have counted."""
    step_tokens = sum(batch.step_tokens or int((batch.labels != IGNORED).sum()) for batch in batches if batch.labels is not None)
    for batch in batches:
        batch.step_tokens = step_tokens
    return batches


def _handed_over(steps: Iterator[list[Batch]], workers: Sequence[BaseProcess]) -> list[Batch] | None:
    try:
        return next(steps, None)
    except LmError as error:  # torch raises what a worker raised, with a traceback before the sentence
        if not workers:
            raise
        raise type(error)(error.sentence.removesuffix("\\n").rpartition(f"{type(error).__name__}: ")[2]) from None
    except (ConnectionError, EOFError) as error:  # one died while its tensors were on their way
        time.sleep(1)  # torch's handler of SIGCHLD mostly raises in here, and names it
        dead = ", ".join(str(worker.pid) for worker in workers if not worker.is_alive()) or "unknown"
        why = str(error) or type(error).__name__
        raise ResourceError(f"data.workers: DataLoader worker (pid {dead}) has died ({why}). Start again, or set data.workers=0.") from None


def _parts(ids: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    return (ids[at : at + size] for at in range(0, len(ids), size))


def _leave_signals_to_the_run(worker: int) -> None:
    """Ctrl-C and a job's end reach every process, and the run finishes its step with the batches of its workers. They end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(60))


def _as_is(step: list[Batch]) -> list[Batch]:
    return step
