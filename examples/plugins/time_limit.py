"""A callback: the run stops when its time is up, with all saved; the same command goes on, with as much time again.

lm train plugins=examples/plugins/time_limit.py +callbacks.time_limit.minutes=30
"""

import time
from typing import Literal

from pydantic import Field

from lm.kinds import CallbackConfig, RunCallback, TrainModule


class TimeLimitConfig(CallbackConfig):
    """Ends a process of the run behind the first step after so many minutes."""

    kind: Literal["time_limit"] = "time_limit"
    minutes: float = Field(gt=0)
    """From the first step of the process on."""

    def build(self) -> "TimeLimit":
        return TimeLimit(60 * self.minutes)


class TimeLimit(RunCallback):
    """Asks the clock behind each step; all ranks stop together, when the first one would."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def begin(self, module: TrainModule) -> None:
        self.begun_at = time.monotonic()

    def step_end(self, module: TrainModule) -> None:
        (longest,) = module.run.ranks.most(time.monotonic() - self.begun_at)
        module.trainer.should_stop |= longest > self.seconds
