"""What ends a run before trainer.max_steps: a signal, or trainer.max_minutes."""

from itertools import count

from lm.training.callbacks.base import RunCallback
from lm.training.module import TrainModule
from lm.training.state import Clock


class StopOnSignal(RunCallback):
    """From the first step on signals are only recorded. After each step all ranks agree on whether one has come."""

    def begin(self, module: TrainModule) -> None:
        module.run.signals.step = module.step
        module.run.signals.defer()

    def step_end(self, module: TrainModule) -> None:
        module.run.signals.step = module.step
        (number,) = module.run.ranks.most(module.run.signals.received or 0)
        module.run.stopped_by = int(number) or None


class TimeBox(RunCallback):
    """Decides how many steps a run of trainer.max_minutes has, at the last look at the clock before a learning rate depends on that number:
    it looks at logged steps, and at each step up to the first of these in a process, since few may fill the time. From then on the run is
    one of that many trainer.max_steps, so that another machine can repeat it exactly."""

    def begin(self, module: TrainModule) -> None:
        self._begun, self._first_s = module.step, 0.0

    def step_end(self, module: TrainModule) -> None:
        run, step, decided = module.run, module.step, module.run.counters.max_steps is not None
        if run.cfg.trainer.max_minutes is None or decided:
            return
        if step == self._begun + 1:  # the first step of a process, which may compile, is not like the others
            self._first_s = run.clock.elapsed()
            return
        if not self._looks(module, step):
            return
        if (length := run.ranks.from_first(lambda: self._length(module))) is not None:
            run.shorten(length)
            run.journal.record({"step": step, "event": "length decided", "max_steps": length})

    def _looks(self, module: TrainModule, step: int) -> bool:
        return module.run.logs(step) or step - self._begun < module.cfg.trainer.log_every

    def _length(self, module: TrainModule) -> int | None:
        """Returns the run's length in steps; None while the decision can wait for the next look at the clock."""
        run, cfg, step = module.run, module.run.cfg, module.step
        assert cfg.trainer.max_minutes is not None
        spent_s = run.counters.train_s + run.clock.untold()
        left_s = cfg.trainer.max_minutes * 60 - spent_s
        # steps that draw answers take longer than those that learn from them again, and a lap may hold either
        step_s = self._pace(run.clock, step) if run.splits.train.updates == 1 else spent_s / step
        length = max(step + max(0, round(left_s / step_s)), cfg.schedule.warmup_steps + 1)
        next_look = next(later for later in count(step + 1) if self._looks(module, later))
        rates, longest = cfg.schedule, cfg.trainer.max_steps
        if length >= longest or (next_look < length and rates.same(next_look, longest, length)):
            return None
        while not rates.same(step - 1, longest, length):  # the steps so far must have had the same rates in a run of this length
            length += 1
        return length

    def _pace(self, clock: Clock, step: int) -> float:
        """Returns the seconds of a step in the last lap, or in the one under way, without the first step of this process."""
        steps, seconds = clock.under_way(step) or (clock.steps, clock.step_s * clock.steps)
        if step - steps == self._begun:
            steps, seconds = steps - 1, seconds - self._first_s
        return seconds / steps
