"""The micro-batches of a run's steps. The order has no state, so loading can start at any step, with any number of ranks and workers."""

import multiprocessing
import pickle
import signal
import sys
import time
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from lm import plugins
from lm.data.rows.base import Rows
from lm.data.sizes import Sizes
from lm.errors import ConfigError, LmError, ResourceError
from lm.nn.batch import IGNORED, Batch

_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGHUP)  # by workers


def micro_batches(global_batch: int, world: int, micro_batch: int) -> tuple[int, int]:
    """Returns (rows per micro-batch, micro-batches per step) of one rank. The rows are the largest divisor, up to `micro_batch`, of the
    rank's rows per step. Raises ConfigError where global_batch is not a multiple of world."""
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
    sizes: Sizes,
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
    """Returns one rank's micro-batches of the steps start_step..max_steps-1; each carries the label tokens of this rank's whole step.

    micro_batch: most rows of each, as `micro_batches` counts them.
    train_rows: only so many first rows are read, over and over.
    widest_first: replaces the first micro-batch of each step by rows that make the widest possible one.
    pinned: puts batches into pinned memory, from which a GPU copies asynchronously.
    """
    steps = Steps(rows, seed, sizes, micro_batch, rank, world, train_rows, widest_first)
    accumulation = sizes.each(lambda n: micro_batches(n, world, micro_batch)[1])
    length = accumulation.before(max_steps) - accumulation.before(start_step)
    return TrainLoader(steps, range(start_step, max_steps), length, workers, pinned)


def eval_batches(rows: Rows, ids: NDArray[np.int64], micro_batch: int) -> Iterator[Batch]:
    """Yields batches of these rows, in this order; the last batch may have fewer rows."""
    for part in _parts(ids, micro_batch):
        yield from _counted([rows.batch(part)])


class TrainLoader(Sized):
    """Iterates over all micro-batches of all steps; `len` is their number. Can be iterated again. Use inside `worker_faults`.

    waited_s: seconds that the loop has waited for batches so far, not counting those in which its GPU still had work.
    """

    def __init__(self, steps: "Steps", order: range, length: int, workers: int, pinned: bool) -> None:
        start = _leave_signals_to_the_run if workers else None
        own = "fork" if sys.platform == "linux" else None  # the default until Python 3.14: sends no data
        method = (multiprocessing.get_start_method(allow_none=True) or own) if workers else None  # the program's choice, if it has made one
        self._steps = DataLoader(
            steps, batch_size=None, sampler=order, num_workers=workers, collate_fn=_as_is, worker_init_fn=start, pin_memory=pinned,
            multiprocessing_context=method,
        )  # fmt: skip
        self._new = bool(workers) and method != "fork"  # workers begin as new processes
        self._alone = self._new and b"__main__" not in pickle.dumps(steps)
        self._pinned = pinned
        self._length = min(length, sys.maxsize)  # len() allows no more
        self.waited_s = 0.0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        others = multiprocessing.active_children()
        with _undisturbed() if self._new else nullcontext(), _without_program() if self._alone else nullcontext():
            steps: Any = iter(self._steps)
        workers = [child for child in multiprocessing.active_children() if child not in others]
        try:
            while (step := self._waited_for(steps, workers)) is not None:
                yield from step
        finally:
            if workers:  # torch has no public way. An iterator that the garbage collector finds in a cycle, as an error's traceback makes
                steps._shutdown_workers()  # one, has its queues closed first; then torch waits for 10 s and Python's end for a minute

    def _waited_for(self, steps: Iterator[list[Batch]], workers: Sequence[BaseProcess]) -> list[Batch] | None:
        begun = time.perf_counter()
        step = _handed_over(steps, workers)
        if not self._pinned or torch.cuda.current_stream().query():
            self.waited_s += time.perf_counter() - begun
        return step


@contextmanager
def worker_faults() -> Iterator[None]:
    """Turns the death of a loader process into a ResourceError. Torch raises it from a signal handler, so anywhere in the training loop."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ResourceError(f"data.workers: {str(error).splitlines()[0].rstrip('.')}. Start again, or set data.workers=0.") from None


@dataclass(frozen=True)
class Steps(Dataset[list[Batch]]):
    """Item `step` is the list of this rank's micro-batches: the rows of the step go to ranks and micro-batches by their width, the widest
    first, since the sum over all is the same in any order, and the less is padding."""

    rows: Rows
    seed: int
    sizes: Sizes
    micro_batch: int
    rank: int
    world: int
    train_rows: int | None
    widest_first: bool

    def __getitem__(self, step: int) -> list[Batch]:
        ids = self.rows.by_width(self.rows.at(self.seed, self.sizes.places(step // self.rows.updates), self.train_rows))
        size, _ = micro_batches(len(ids), self.world, self.micro_batch)
        parts = list(_parts(ids, size))[self.rank :: self.world]
        if self.widest_first:
            parts[0] = self.rows.widest(len(parts[0]))
        return _counted([self.rows.batch(part, step) for part in parts])

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_plugins, (pickle.dumps(tuple(vars(self).values())),)


def _with_plugins(fields: bytes) -> Steps:
    """Makes the `Steps` in a process that was not forked and has no plugins yet, out of which the rows may be."""
    plugins.load()
    return Steps(*pickle.loads(fields))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Within the block the signals that workers ignore are blocked, in new processes too: these import torch before they can ignore any."""
    resource_tracker.ensure_running()  # else the first process starts it, which lets SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_program() -> Iterator[None]:
    """Processes that begin within the block, and are not forks, do not run the program again: it may train where it is not guarded by
    `if __name__ == "__main__"`, and one that was read from stdin has no file."""
    names = vars(sys.modules["__main__"])
    known: dict[str, Any] = {name: names[name] for name in ("__file__", "__spec__") if name in names}
    names.update(dict.fromkeys(known))
    try:
        yield
    finally:
        names.update(known)


def _counted(batches: list[Batch]) -> list[Batch]:
    """Sets `step_tokens` of each micro-batch to the sum over all of the step's: of label tokens, or of the counts that the rows have set.
    The first one gets the `beside` of all."""
    step_tokens = sum(batch.step_tokens or int((batch.labels != IGNORED).sum()) for batch in batches if batch.labels is not None)
    beside = [each for batch in batches for each in batch.beside]
    for number, batch in enumerate(batches):
        batch.step_tokens, batch.beside = step_tokens, [] if number else beside
    return batches


def _handed_over(steps: Iterator[list[Batch]], workers: Sequence[BaseProcess]) -> list[Batch] | None:
    try:
        return next(steps, None)
    except LmError as error:  # torch raises a worker's error again, with a traceback before its sentence
        if not workers:
            raise
        raise type(error)(error.sentence.removesuffix("\\n").rpartition(f"{type(error).__name__}: ")[2]) from None
    except (ConnectionError, EOFError) as error:  # a worker died while its tensors were sent
        time.sleep(1)  # torch's handler of SIGCHLD mostly raises in here, and names it
        dead = ", ".join(str(worker.pid) for worker in workers if not worker.is_alive()) or "unknown"
        why = str(error) or type(error).__name__
        raise ResourceError(f"data.workers: DataLoader worker (pid {dead}) has died ({why}). Start again, or set data.workers=0.") from None


def _parts(ids: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    return (ids[at : at + size] for at in range(0, len(ids), size))


def _leave_signals_to_the_run(worker: int) -> None:
    """Makes a worker ignore Ctrl-C and the end of a job, which reach every process: the run still needs the worker's batches to finish its
    step. Workers end with the run, or a minute after SIGTERM."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(60))


def _as_is(step: list[Batch]) -> list[Batch]:
    return step
