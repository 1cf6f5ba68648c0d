"""Resuming: what a run folder already holds, and whether a config may go on from its newest checkpoint."""

import json
import os
from bisect import bisect
from collections.abc import Callable
from glob import iglob
from pathlib import Path
from typing import Any

from lm import plugins
from lm.data.kinds import TokenizerFileConfig
from lm.data.sources.fingerprint import changed_files
from lm.data.store.prepare import Prepared
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.nn.model_config import model_config
from lm.nn.transformer import build_model
from lm.schema import Tree, flatten, from_tree
from lm.spelling import below
from lm.storage.adapted import adapters_of, names_paths, near, placed
from lm.storage.atomic import clean
from lm.storage.checkpoint import CheckpointReader, newest_valid
from lm.storage.manifest import verify
from lm.storage.model_folder import IMPORTED, folder_hash, read_config, require_same_shapes, resolve_model
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig
from lm.training.optim.schedule import FreeConfig
from lm.training.state import Counters, Saved
from lm.units import ABSENT

Say = Callable[[str], None]

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


def open_run(folder: RunFolder, cfg: TrainConfig, say: Say) -> Path | None:
    """Returns the checkpoint to resume from; None where the run starts, or where only the model of a finished run is left.

    Cleans up after a killed process. Raises CheckpointError, or ConfigError with the differences between the configs.
    """
    clean(folder.path)
    clean(folder.checkpoints)
    folder.require_own_model()
    newest, rejected = newest_valid(folder.checkpoints)
    for reason in rejected:
        say(f"not used: {reason}")
    if newest is None and rejected:
        count = f"none of the {len(rejected)} checkpoints" if len(rejected) > 1 else "the only checkpoint"
        rule = "is not valid" if len(rejected) == 1 else "is valid"
        raise CheckpointError(f"{folder.path}: {count} {rule}, and a run goes on from one. Remove {folder.checkpoints} to start anew.")
    if newest is None and cfg.resume.mode == "must":
        raise CheckpointError(f"{folder.path}: resume.mode=must, but there is no valid checkpoint. Use resume.mode=auto to start anew.")
    if newest is not None:
        reader = CheckpointReader(newest, verified=True)
        saved = Saved.of(reader)
        saved.require_patience(cfg.trainer)
        goes_on = not saved.counters.done(saved.step, cfg.trainer)
        config, left_out = _as_of_today(saved.config), saved.counters.rows_from
        _require_same_config(folder, config, cfg, saved.step, newest, reader.meta.get("parent_hash"), goes_on, left_out)
        _require_same_weights(reader, cfg)
        before = config["trainer"]["max_steps"]
        if config["schedule"] != cfg.schedule.tree():
            say(f"the schedule is another one than the run's, and the same for the {saved.step:,} steps so far")
        elif before != cfg.trainer.max_steps and cfg.schedule.of_length:
            say(f"trainer.max_steps was {before:,} and is {cfg.trainer.max_steps:,}: from here on the rate is that of the new length")
        if saved.step < cfg.trainer.max_steps and (adapters := adapters_of(folder.path)):
            which = f"{adapters[0]} holds" if len(adapters) == 1 else f"{adapters[0]} and {len(adapters) - 1} more hold"
            say(f"{which} an adapter of {folder.model} as it is. A copy of that beside {folder.path} is found when this run has changed it")
    elif folder.model.is_dir() and folder.exists():
        _require_same_config(folder, _as_of_today(folder.config()), cfg, cfg.trainer.max_steps, folder.path)
    return newest


def finished(folder: RunFolder, cfg: TrainConfig, reader: CheckpointReader | None, say: Say) -> Tree | None:
    """Returns the summary of a run that is complete; None where work is left, be it only to write a damaged model again.

    Raises CheckpointError where the run is to be longer now but its checkpoints are gone.
    """
    try:
        if not (summary := folder.summary()):
            return None
        verify(folder.model)
    except CheckpointError as error:
        say(f"written again: {error}")
        return None
    saved = Saved.of(reader) if reader is not None else None
    step, counters = (saved.step, saved.counters) if saved is not None else (summary["steps"], Counters())
    if counters.done(step, cfg.trainer):
        return summary if step == summary["steps"] else None
    if reader is None:
        raise CheckpointError(
            f"{folder.path}: the run has ended at step {step:,} and its checkpoints are gone, so it cannot go on to trainer.max_steps="
            f"{cfg.trainer.max_steps}. Start another one with init_from={folder.path} and a new run.name."
        )
    return None


def parent_hash(cfg: TrainConfig, meta: Tree | None) -> str | None:
    """Returns the hash of the model that the run started from; None where the run drew its weights.  meta: that of the newest checkpoint.

    Raises ConfigError where training still needs that model and init_from now holds another one.
    """
    needs = "its adapter is trained beside" if cfg.adapter is not None else None
    if cfg.objective.needs_parent or cfg.objective.own_answers:
        needs = f"objective={cfg.objective.kind} {'compares with' if cfg.objective.needs_parent else 'answers in the tokens of'}"
    if cfg.init_from is None or (meta is not None and needs is None):
        return meta.get("parent_hash") if meta is not None else None
    now = folder_hash(resolve_model(cfg.init_from))
    if meta is not None and meta.get("parent_hash", now) != now:
        raise ConfigError(
            f"init_from={cfg.init_from}: not the model that the run started from, and {needs} that one. Restore it, or set run.name."
        )
    return now


def teacher_hash(cfg: TrainConfig, meta: Tree | None) -> str | None:
    """Returns the hash of the teacher or reward model; None where there is none.  meta: as in `parent_hash`.  Raises ConfigError where the
    run has learned from another one so far."""
    if (further := cfg.objective.learns_from()) is None:
        return None
    option, folder = further
    now = folder_hash(resolve_model(folder))
    if meta is not None and meta.get("teacher_hash", now) != now:
        raise ConfigError(f"{option}={folder}: not the model that the run has learned from so far. Restore it, or set run.name.")
    return now


def imported(cfg: TrainConfig, meta: Tree | None) -> Tree:
    """Returns what is kept of the import that the model began as, for its export: IMPORTED, null where there is none; prompts are those of
    the data, if any, and null where its sources differ in them.  meta: as in `parent_hash`."""
    known = meta if meta is not None else read_config(resolve_model(cfg.init_from)) if cfg.init_from is not None else {}
    return {key: known.get(key) for key in IMPORTED} | ({"prompts": own or None} if (own := cfg.data.prompts()) is not None else {})


def require_same_data(folder: RunFolder, cfg: TrainConfig, meta: Tree, data: Prepared) -> None:
    """Raises ConfigError naming what has changed since the checkpoint. `data` must have been read with the checkpoint's tokenizer."""
    given = cfg.tokenizer
    if isinstance(given, TokenizerFileConfig) and cfg.init_from is None and not given.gave(meta["tokenizer_hash"]):
        raise ConfigError(f"{given.path}: not the tokenizer that {folder.path} was started with. Restore the file, or set run.name.")
    if meta["fingerprint"] != data.fingerprint:
        what = next(iter(changed_files(meta["files"], data.files)), "the data has changed")
        raise ConfigError(
            f"{folder.path}: {what} since the run started, and a resumed run needs the same data. Restore what it had, or set run.name."
        )


def require_same_template(folder: RunFolder, cfg: TrainConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError where the chat template that the data name is another one than the run's so far: replies of an environment and the
    model's folder follow from it even where the tokens of the data do not.  tokenizer: the checkpoint's."""
    if (before := tokenizer.chat_template) is None or cfg.data.chat_template(tokenizer) in (None, before):
        return
    records = [each for part in cfg.data.parts().values() if (each := part.records) is not None]
    name = next(filter(None, (each.named_template() for each in records)), None)
    raise ConfigError(
        f"data.record.template={name}: not the chat template that {folder.path} was started with. Restore it, or set run.name."
    )


def _require_same_weights(reader: CheckpointReader, run: TrainConfig) -> None:
    """Raises CheckpointError naming the first weights whose shapes differ between checkpoint and config."""
    try:
        saved = model_config(reader.meta["model"])
    except ConfigError as error:
        raise CheckpointError(f"{reader.folder}: {error}") from None
    cfg = run.objective.headed(run.model)
    full = build_model(
        cfg.replace(vocab_size=cfg.vocab_size or saved.vocab_size, max_seq_len=cfg.max_seq_len or saved.max_seq_len), device="meta"
    )
    if run.adapter is not None:
        run.adapter.apply(full)
    model = {name: tuple(p.shape) for name, p in (full.named_parameters() if run.adapter is None else run.adapter.own(full).items())}
    there = {name: reader.shape(name) for name in reader.names()}
    require_same_shapes(model, there, str(reader.folder))


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


def _as_of_today(saved: Tree) -> Tree:
    """Returns a saved config with options added to lm since: the default of a new option stands for how runs were before it."""
    try:
        return from_tree(TrainConfig, saved).tree()
    except ConfigError:
        return saved


def _require_same_config(
    folder: RunFolder, saved: Tree, cfg: TrainConfig, step: int, newest: Path, parent: str | None = None, goes_on: bool = False,
    left_out: int = 0,
) -> None:  # fmt: skip
    """Raises ConfigError listing every difference that a resume does not allow. trainer.max_steps may grow; it may shrink only where all
    steps so far would have been the same in the shorter run; the schedule may change where their rates would have been; and phases may
    change behind the step.

    saved: `_as_of_today`.  newest: what the run's weights can be taken from.  parent: hash of the model that the run started from, which
    may lie elsewhere by now.
    goes_on: it has steps left, so that its data and teacher are read.  left_out: steps whose rows rollbacks have left out.
    """
    plugins.require(saved, folder.config_file)
    before, after = flatten(saved), flatten(cfg.tree())
    there = flatten(placed(saved, folder.path, whole=True))  # since one file may be spelled in two ways
    here = flatten(placed(cfg.tree(), Path.cwd(), whole=True))
    changed = [key for key in before | after if there.get(key) != here.get(key) and not below(key, _MAY_CHANGE)]
    changed = [key for key in changed if key not in _PHASES or not _same_so_far(before.get(key), after.get(key), step + left_out)]
    apart = {key: _apart(key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in changed}
    changed = [key for key in changed if not (goes_on and all(_moved(*each, folder.path) for each in apart[key]))]
    if "init_from" in changed and cfg.init_from is not None and folder_hash(resolve_model(cfg.init_from)) == parent:
        changed = [key for key in changed if key not in ("init_from", "tokenizer.path")]
    if any(below(key, ("schedule",)) for key in changed) and _same_rates(saved, cfg, step):
        changed = [key for key in changed if not below(key, ("schedule",))]
    if type(steps := before.get("trainer.max_steps")) is not int:
        raise CheckpointError(f"{folder.path}: its config has trainer.max_steps={steps!r}, and a whole number is needed. Restore the file.")
    if cfg.trainer.max_steps > steps or (step < cfg.trainer.max_steps < steps and step <= cfg.shared_steps(steps)):
        changed.remove("trainer.max_steps")
    if not changed:
        return
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
