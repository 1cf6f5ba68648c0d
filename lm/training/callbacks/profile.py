"""Records a few steps with torch's profiler, and tells what takes their time."""

import os
import time
from collections.abc import Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from lm.errors import LmError
from lm.storage.atomic import disk_errors
from lm.training.callbacks.base import RunCallback
from lm.training.module import TrainModule

_WARM_UP = 3  # steps of this process that pass first: they compile, and fill caches
_ROWS, _SHOWN = 40, 8  # operations in the table, and on the terminal
_STEP = "ProfilerStep"  # how torch names what a step does outside its operations


class Profile(RunCallback):
    """Records trainer.profile steps of this process, on every rank, into the run's folder profile/."""

    _profiler: profile | None = None  # while it records

    def begin(self, module: TrainModule) -> None:
        self._first, self._steps = module.step + _WARM_UP, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Starts: not behind the step before, where a validation, samples and a save are still to come."""
        wanted, module = pl_module.cfg.trainer.profile, pl_module
        if wanted is None or self._profiler is not None or self._steps or module.micro or module.step < self._first:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write lines of its own
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (module.device.type == "cuda")
        self._profiler, self._at, self._first = profile(activities=kinds), time.perf_counter(), module.step + 1
        self._profiler.start()

    def step_end(self, module: TrainModule) -> None:
        if self._profiler is not None:
            self._steps += 1
            self._profiler.step()
            if self._steps == module.cfg.trainer.profile:
                self._end(module, self._profiler)

    def finish(self, module: TrainModule) -> None:
        wanted = module.cfg.trainer.profile
        if self._profiler is not None and self._steps:
            self._end(module, self._profiler)
        elif wanted is not None and not self._steps:
            self._stop()
            module.run.journal.console.say(f"trainer.profile={wanted}: nothing was recorded, as fewer than {_WARM_UP + 1} steps were left")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _end(self, module: TrainModule, profiler: profile) -> None:
        """Stops, and writes trace and table."""
        steps, run = self._steps, module.run
        seconds = (time.perf_counter() - self._at) / steps
        which = f"step {self._first:,}" if steps == 1 else f"steps {self._first:,} to {module.step:,}"
        with run.clock.paused(), run.journal.console.during("Writing the profile"):
            self._stop()
            lines = [f"profile: {which}, {seconds:.3g} s each", *table(profiler.key_averages(), steps, module.device.type)]
            trace = run.journal.folder.path / "profile" / f"rank-{run.ranks.rank}.json.gz"
            told = f"profile: {trace} opens in ui.perfetto.dev; the whole table is beside it"
            try:
                with disk_errors(trace):
                    trace.parent.mkdir(exist_ok=True)
                    trace.with_name(f"rank-{run.ranks.rank}.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
                    profiler.export_chrome_trace(str(trace))
            except LmError as error:
                told = f"profile: not written ({error})"
        for line in [*lines[: _SHOWN + 2], told]:
            run.journal.console.say(line)


def table(found: Sequence[Any], steps: int, device: str) -> list[str]:
    """Returns a heading, and for each of the operations that take most time: its name, calls and milliseconds a step, and its part.

    found: `profile.key_averages()`.  The time is that of the operation alone, without those that it calls: on CUDA of its kernels, else of
    the thread that called it.
    """
    times = [(each.self_device_time_total if device == "cuda" else each.self_cpu_time_total, each.count, each.key) for each in found]
    total = sum(us for us, _, _ in times) or 1
    rows = []
    for us, n, key in sorted(times, reverse=True)[:_ROWS]:
        name = "outside of operations" if key.startswith(_STEP) else key[:90]
        rows.append(f"{us / steps / 1e3:10,.2f} ms  {us / total:6.1%}  {n / steps:8,.0f} x  {name}")
    return [f"{'a step':>13}  {'part':>6}  {'calls':>8}    operation", *rows]
