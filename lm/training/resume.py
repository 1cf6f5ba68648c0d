"""Resuming: what a run folder already holds, and whether a run may go on from its newest checkpoint."""

from collections.abc import Callable
from pathlib import Path

from lm.data.kinds import TokenizerFileConfig
from lm.data.sources.fingerprint import changed_files
from lm.data.store.prepare import Prepared
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.nn.model_config import model_config
from lm.nn.transformer import build_model
from lm.schema import Tree
from lm.storage.adapted import adapters_of
from lm.storage.atomic import clean
from lm.storage.checkpoint import CheckpointReader, newest_valid
from lm.storage.manifest import verify
from lm.storage.model_folder import IMPORTED, folder_hash, read_config, require_same_shapes, resolve_model
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig
from lm.training.same_settings import as_of_today, require_same_settings
from lm.training.state import Counters, Saved

Say = Callable[[str], None]


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
        config, left_out = as_of_today(saved.config), saved.counters.rows_from
        require_same_settings(folder, config, cfg, saved.step, newest, reader.meta.get("parent_hash"), goes_on, left_out)
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
        require_same_settings(folder, as_of_today(folder.config()), cfg, cfg.trainer.max_steps, folder.path)
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
    the data, if any, and null where its sources differ in them; asked_as is the objective's.  meta: as in `parent_hash`."""
    known = meta if meta is not None else read_config(resolve_model(cfg.init_from)) if cfg.init_from is not None else {}
    prompts = {"prompts": own or None} if (own := cfg.data.prompts()) is not None else {}
    return {key: known.get(key) for key in IMPORTED} | prompts | {"asked_as": cfg.objective.asked_as}


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
