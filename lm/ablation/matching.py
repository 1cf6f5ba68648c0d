"""Moves one setting (the knob) of a variant until the variant has the baseline's parameters, FLOPs or training time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.ablation.config import StudyConfig
from lm.cost.count import Counts, count
from lm.errors import ConfigError
from lm.schema import Tree, find_field, from_tree, members
from lm.training.config import TrainConfig

TOLERANCE = 0.005
_GAP = 64  # most invalid values in a row to skip, such as widths that heads do not divide
_MOST = 2**22


@dataclass(frozen=True)
class Size:
    """Size and cost of a training.  flops: for all its tokens."""

    parameters: int
    non_embedding: int
    tokens: int
    flops: int


def size(cfg: TrainConfig) -> Size:
    """Returns size and cost of a training, counted from its config."""
    found, tokens = _counts(cfg), cfg.tokens(cfg.trainer.max_steps)
    return Size(found.parameters, found.non_embedding, tokens, tokens * found.train_flops_per_token)


def matched(study: StudyConfig, configs: dict[str, TrainConfig], step_s: Mapping[str, float]) -> dict[str, TrainConfig]:
    """Returns each variant with its knob moved so that it matches the baseline to 0.5 %.

    step_s: seconds per step by variant, for match=time.
    Raises ConfigError where the knob is no whole number, or cannot reach the baseline's measure.
    """
    if study.match == "tokens" or (study.match == "time" and not configs.keys() <= step_s.keys()):  # not the study that was measured
        return configs
    if study.match == "time":
        seconds = configs[study.baseline].trainer.max_steps * step_s[study.baseline]
        return {name: cfg if name == study.baseline else _timed(name, cfg, seconds, step_s[name]) for name, cfg in configs.items()}
    key, measure = str(study.moved), _MEASURES[study.match]
    target = measure(configs[study.baseline])
    return {name: cfg if name == study.baseline else _solved(name, cfg, key, measure, target) for name, cfg in configs.items()}


def moved(cfg: TrainConfig, key: str, value: Any) -> TrainConfig:
    """Returns the config with one value changed. Where that is the length, warm-up, smaller batches and a mixture's phases keep their share
    of the steps."""
    tree = cfg.tree()
    if key == "trainer.max_steps":
        share = value / cfg.trainer.max_steps
        tree["schedule"]["warmup_steps"] = round(tree["schedule"]["warmup_steps"] * share)
        for key_of in ("ramp", "phases"):
            if phases := tree["data"].get(key_of):
                tree["data"][key_of] = _stretched(phases, share)
    *parents, last = key.split(".")
    section = tree
    for parent in parents:
        section = section[parent]
    section[last] = value
    return from_tree(TrainConfig, tree)


def _stretched(phases: list[Tree], share: float) -> list[Tree]:
    """Returns phases that end at a share of their steps; those that no step is left for are left out."""
    found: list[Tree] = []
    for phase in phases:
        end = max(1, round(phase["until_step"] * share))
        if not found or end > found[-1]["until_step"]:
            found.append(phase | {"until_step": end})
    return found


_MEASURES: dict[str, Callable[[TrainConfig], int]] = {"params": lambda cfg: size(cfg).parameters, "flops": lambda cfg: size(cfg).flops}


def _solved(name: str, cfg: TrainConfig, key: str, measure: Callable[[TrainConfig], int], target: int) -> TrainConfig:
    """Returns a variant with its knob moved to the target, by bisection: every measure grows with its knob."""
    _, field = find_field(TrainConfig, cfg.tree(), key.split("."))
    if field is None or int not in members(field.annotation):
        raise ConfigError(f"knob={key}: variant {name} has no such whole number. Name a setting that every variant has.")

    def at(value: int) -> int | None:
        try:
            return measure(moved(cfg, key, value))
        except ConfigError:  # an invalid value, such as a width that does not divide
            return None

    def short(value: int) -> bool:  # of the target, as the first valid value from here on
        return next((found for _, found in _first(at, range(value, min(_MOST, value + _GAP)))), 0) < target

    low, high = 1, 1
    while high < _MOST and short(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if short(middle) else (low, middle)
    below, above = range(low, max(0, low - _GAP), -1), range(high, min(_MOST, high + _GAP))  # to skip invalid values
    near = dict(found for values in (below, above) for found in _first(at, values))
    best = min(near, key=lambda value: abs(near[value] - target), default=None)
    if best is None or abs(near[best] - target) > TOLERANCE * target:
        reached = f"{near[best]:,}" if best is not None else "nothing"
        raise ConfigError(f"knob={key}: variant {name} reaches {reached} where the baseline has {target:,}. Choose a finer knob.")
    return moved(cfg, key, best)


def _first(at: Callable[[int], int | None], values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first valid value of a knob and its measure; nothing where no value is valid."""
    for value in values:
        if (found := at(value)) is not None:
            yield value, found
            return


def _timed(name: str, cfg: TrainConfig, seconds: float, step_s: float) -> TrainConfig:
    steps = max(1, round(seconds / step_s))
    if abs(steps * step_s - seconds) > TOLERANCE * seconds:
        reached = f"variant {name} takes {steps * step_s:.3g} s in {steps} steps where the baseline takes {seconds:.3g} s"
        raise ConfigError(f"match=time: {reached}. Train for more steps, of which one is less.")
    return moved(cfg, "trainer.max_steps", steps)


def _counts(cfg: TrainConfig) -> Counts:
    """Returns the counts of the model with its sizes filled in as training does."""
    n_tokens = cfg.model.vocab_size or cfg.tokenizer.size(cfg.objective.specials())
    if n_tokens is None:
        raise ConfigError("model.vocab_size: null, and the size of the tokenizer is not known before it is read. Set model.vocab_size.")
    return count(cfg.sized_model(n_tokens), cfg.data.seq_len)
