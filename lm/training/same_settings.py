"""Whether a run's config may go on in its folder: which settings a resume lets differ, and what it says of the others."""

import json
import os
from bisect import bisect
from glob import iglob
from pathlib import Path
from typing import Any

from lm import plugins
from lm.errors import CheckpointError, ConfigError
from lm.schema import Tree, flatten, from_tree
from lm.spelling import below
from lm.storage.adapted import names_paths, near, placed
from lm.storage.model_folder import folder_hash, resolve_model
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig
from lm.training.optim.schedule import FreeConfig
from lm.units import ABSENT

_MAY_CHANGE = (
    "run", "launch", "strategy", "logger", "checkpoint", "resume", "traceback", "check", "plan", "budget", "metrics", "eval", "numerics",
    "trainer.micro_batch", "trainer.val_every", "trainer.log_every", "trainer.sample_prompts", "trainer.sample_tokens", "trainer.device",
    "trainer.compile", "trainer.deterministic", "trainer.profile", "trainer.recompute", "trainer.recompute_every", "trainer.early_stop",
    "data.workers", "data.verify", "data.cache_dir", "data.remote", "optim.state_bits", "objective.parts", "objective.recompute",
    "objective.threads",
)  # fmt: skip
_BY_CONTENT = ("data", "objective.teacher", "objective.reward_model", "tokenizer.path")
"""What a run that goes on reads, and compares with what it has read so far."""
_WARMUP, _PHASES = "schedule.warmup_steps", ("data.phases", "data.ramp")


def as_of_today(saved: Tree) -> Tree:
    """Returns a saved config with options added to lm since: the default of a new option stands for how runs were before it."""
    try:
        return from_tree(TrainConfig, saved).tree()
    except ConfigError:
        return saved


def require_same_settings(
    folder: RunFolder, saved: Tree, cfg: TrainConfig, step: int, newest: Path, parent: str | None = None, goes_on: bool = False,
    left_out: int = 0,
) -> None:  # fmt: skip
    """Raises ConfigError listing every difference that a resume does not allow. trainer.max_steps may grow; it may shrink only where all
    steps so far would have been the same in the shorter run; the schedule may change where their rates would have been; and phases may
    change behind the step.

    saved: `as_of_today`.  newest: what the run's weights can be taken from.  parent: hash of the model that the run started from, which
    may lie elsewhere by now.
    goes_on: it has steps left, so that its data and teacher are read.  left_out: steps whose rows rollbacks have left out.
    """
    plugins.require(saved, folder.config_file)
    before = flatten(saved)
    if type(steps := before.get("trainer.max_steps")) is not int:
        raise CheckpointError(f"{folder.path}: its config has trainer.max_steps={steps!r}, and a whole number is needed. Restore the file.")
    apart = _not_allowed(folder.path, saved, cfg, step, parent, goes_on, left_out)
    if not apart:
        return
    changed = [*apart]
    also = ""
    if _WARMUP in changed and cfg.trainer.max_steps != steps:
        also = f" To train longer, write {_WARMUP}={before[_WARMUP]}, the run's."
    if "trainer.max_steps" in changed and newest != folder.path:
        longer = cfg.replace(trainer=cfg.trainer.replace(max_steps=steps))
        shortest = step + 1 + bisect(range(step + 1, steps), False, key=lambda length: step <= longer.shared_steps(length))
        how = "at all" if shortest >= steps else f"below {shortest:,}"
        also += f" After step {step:,} trainer.max_steps cannot be lowered {how}."
    lines = [f"  {name}: {_typed(was)} in the run, {_typed(now)} now" for key in changed for name, was, now in apart[key]]
    shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    other_weights = any(key.split(".")[0] in ("model", "tokenizer", "adapter") for key in changed)
    onward = "" if other_weights else f", from its weights with init_from={newest} run.name=..."
    raise ConfigError(
        f"{folder.path}: the run exists with another config ({shown}), and a resumed run may only change where and how often it works, and"
        " raise trainer.max_steps, or lower it before a rate depends on it, and change phases and a schedule that it has not come to."
        f" Set run.name to start a new run{onward}, or restore the values.{also}",
        before=lines,
    )


def _not_allowed(
    folder: Path, saved: Tree, cfg: TrainConfig, step: int, parent: str | None, goes_on: bool, left_out: int
) -> dict[str, list[tuple[str, Any, Any]]]:
    """Returns the keys that a resume does not let differ, each with what differs in it.  folder: the run's; the rest as in
    `require_same_settings`."""
    before, after = flatten(saved), flatten(cfg.tree())
    there = flatten(placed(saved, folder, whole=True))  # since one file may be spelled in two ways
    here = flatten(placed(cfg.tree(), Path.cwd(), whole=True))
    changed = [key for key in before | after if there.get(key) != here.get(key) and not below(key, _MAY_CHANGE)]
    changed = [key for key in changed if key not in _PHASES or not _same_so_far(before.get(key), after.get(key), step + left_out)]
    apart = {key: _apart(key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in changed}
    changed = [key for key in changed if not (goes_on and all(_moved(*each, folder) for each in apart[key]))]
    if "init_from" in changed and cfg.init_from is not None and folder_hash(resolve_model(cfg.init_from)) == parent:
        changed = [key for key in changed if key not in ("init_from", "tokenizer.path")]
    if any(below(key, ("schedule",)) for key in changed) and _same_rates(saved, cfg, step):
        changed = [key for key in changed if not below(key, ("schedule",))]
    if _fits_length(cfg, before["trainer.max_steps"], step):
        changed = [key for key in changed if key != "trainer.max_steps"]
    return {key: apart[key] for key in changed}


def _fits_length(cfg: TrainConfig, before: int, step: int) -> bool:
    """Whether trainer.max_steps is higher than before, or lower with the same steps so far."""
    now = cfg.trainer.max_steps
    return now > before or (step < now < before and step <= cfg.shared_steps(before))


def _typed(value: Any) -> str:
    """Returns a value as it is given on the command line, where None is null."""
    if value is ABSENT:
        return "absent"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _has_sections(value: Any) -> bool:
    """Whether a value is a list of sections, such as phases or sources."""
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _same_so_far(was: Any, now: Any, step: int) -> bool:
    """Says whether two lists of phases are the same for all steps before this one."""
    if not (_has_sections(was) and _has_sections(now)):
        return False
    starts = {0, *(phase["until_step"] for phase in was + now)}
    return all(_phase(was, start) == _phase(now, start) for start in starts if start < step)


def _phase(phases: list[Tree], step: int) -> Tree | None:
    """Returns what a step, counted from 0, has of its phase; None where it is behind all phases."""
    found = next((phase for phase in phases if step < phase["until_step"]), None)
    return None if found is None else {key: value for key, value in found.items() if key != "until_step"}


def _apart(key: str, was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Returns what differs in a value: of two lists of as many sections, such as sources, the keys in these."""
    if not (_has_sections(was) and _has_sections(now) and len(was) == len(now)):
        return [(key, was, now)]
    pairs = [(f"{key}.{i}.", flatten(one), flatten(other)) for i, (one, other) in enumerate(zip(was, now, strict=True))]
    both = [(at + name, a.get(name, ABSENT), b.get(name, ABSENT)) for at, a, b in pairs for name in a | b]
    return [(name, a, b) for name, a, b in both if a != b]


def _same_rates(saved: Tree, cfg: TrainConfig, step: int) -> bool:
    """Says whether the steps before this one have the same rates in both."""
    try:
        was = from_tree(TrainConfig, saved)
    except ConfigError:
        return False
    of_rates_alone = not any(isinstance(each.schedule, FreeConfig) for each in (was, cfg))
    rates = ([each.schedule.factor(i, each.trainer.max_steps) for i in range(step)] for each in (was, cfg))
    return cfg.trainer.max_minutes is None and of_rates_alone and next(rates) == next(rates)


def _moved(key: str, was: Any, now: Any, folder: Path) -> bool:
    """Whether this key names other files or folders now, and nothing is left of the old ones. What is read is compared by content."""
    if not below(key, _BY_CONTENT) or any(named in (None, ABSENT) or not names_paths(key, named) for named in (was, now)):
        return False
    return not any(_is_left(str(each), folder) for each in (was if isinstance(was, list) else [was]))


def _is_left(named: str, folder: Path) -> bool:
    """Whether there is still a file of this name, in the folder of this name, or that this pattern means.  folder: as of `near`."""
    if (path := near(named, folder)).exists():
        return not path.is_dir() or any(not each.is_dir() for each in path.rglob("*"))
    return any(os.path.exists(each) for each in iglob(os.path.expanduser(named), recursive=True))
