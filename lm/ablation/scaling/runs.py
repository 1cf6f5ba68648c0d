"""A ladder on disk: every size for every number of tokens, frozen before the first run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lm.ablation.matching import Size, moved, size
from lm.ablation.runs import Asked
from lm.ablation.scaling.config import LADDER, LEAST, Count, LadderConfig
from lm.ablation.scaling.law import Point
from lm.ablation.tuning import TunedRuns
from lm.ablation.variants import plain_config
from lm.errors import ConfigError
from lm.schema import Config
from lm.training.config import TrainConfig
from lm.units import counted


class Rung(Config):
    """A size for a number of tokens."""

    size: str
    times: float
    config: TrainConfig


class AskedLadder(Asked):
    """What is in ladder.json."""

    file = LADDER
    grows = "ladder.seeds"

    ladder: LadderConfig
    rungs: dict[str, Rung]
    """By name; seed, name and folder of a run are its own."""


@dataclass(frozen=True)
class Cell:
    """A rung with its results so far.  losses: by seed, infinite where a run diverged."""

    name: str
    rung: Rung
    cost: Size
    losses: dict[int, float]

    def n(self, count: Count) -> int:
        """Returns the number of parameters, counted as `count` says."""
        return _n(self.cost, count)

    def points(self, count: Count) -> list[Point]:
        """Returns the runs that have ended with a finite loss."""
        return [Point(self.n(count), self.cost.tokens, loss) for loss in self.losses.values() if math.isfinite(loss)]


class Ladder(TunedRuns):
    """`folder`/ladder.json, and one run folder beside it for each size, number of tokens and seed."""

    config: LadderConfig

    def __init__(self, folder: Path, asked: AskedLadder) -> None:
        super().__init__(folder, asked, asked.ladder, {name: rung.config for name, rung in asked.rungs.items()})
        self.rungs = asked.rungs

    @cached_property
    def costs(self) -> dict[str, Size]:
        """Returns size and cost of a run of each rung."""
        return {name: size(rung.config) for name, rung in self.rungs.items()}

    def places(self, count: Count) -> list[Point]:
        """Returns the N and D of each rung as points, with NaN for the loss."""
        return [Point(_n(cost, count), cost.tokens, math.nan) for cost in self.costs.values()]

    def cells(self) -> list[Cell]:
        """Returns every rung with the losses known so far."""
        return [Cell(name, rung, self.costs[name], self.results(self.reporting(name))) for name, rung in self.rungs.items()]


def new_ladder(folder: Path, config: LadderConfig, sizes: Mapping[str, TrainConfig]) -> Ladder:
    """Returns a new ladder of these composed configs.

    Raises ConfigError where there are too few sizes or lengths for a law, two are the same, or a run would train nothing or need several
    processes.
    """
    for key, given in (("sizes", sizes), ("tokens", config.tokens)):
        if len(given) < LEAST:
            said = f"{counted(len(given), 'value')} cannot show how the loss bends, and the law has an exponent and a floor"
            raise ConfigError(f"{key}: {said}. Give {LEAST} or more, such as {'64,96,128,192' if key == 'sizes' else '0.5,1,2,4'}.")
    plain = {name: plain_config(f"sizes: {name}", cfg, config.metric) for name, cfg in sizes.items()}
    counts: dict[int, str] = {}
    for name, cfg in plain.items():
        n = size(cfg).non_embedding
        if n in counts:
            raise ConfigError(f"sizes: {name} has {n:,} non-embedding parameters, as {counts[n]} has. Leave one of them out.")
        counts[n] = name
    rungs = {
        f"{name}-x{times:g}": Rung(size=name, times=times, config=_long(cfg, times))
        for name, cfg in plain.items()
        for times in config.tokens
    }
    lengths = {rung.config.trainer.max_steps for rung in rungs.values() if rung.size == next(iter(plain))}
    if len(lengths) < len(config.tokens):
        each = ", ".join(f"{times:g}" for times in config.tokens)
        raise ConfigError(f"tokens: {each} holds a value twice, or two that are as many steps. Give each length once.")
    ladder = Ladder(folder, AskedLadder(ladder=config, rungs=rungs))
    ladder.missing()  # raises for a setting that cannot be tuned, before anything is written
    return ladder


def begun_ladder(folder: Path) -> AskedLadder:
    """Returns what the folder's ladder.json says was asked. Raises ConfigError where there is no ladder."""
    if (asked := AskedLadder.read(folder)) is None:
        raise ConfigError(f"{folder}: there is no ladder here. Start one: lm ablate sizes=64,96,128,192.")
    return asked


def _n(cost: Size, count: Count) -> int:
    return cost.non_embedding if count == "non_embedding" else cost.parameters


def _long(cfg: TrainConfig, times: float) -> TrainConfig:
    if not (math.isfinite(times) and times > 0) or (steps := round(cfg.trainer.max_steps * times)) < 1:
        raise ConfigError(
            f"tokens: {times:g} times {counted(cfg.trainer.max_steps, 'step')} is no training. Give multiples such as 0.5,1,2."
        )
    return moved(cfg, "trainer.max_steps", steps)
