"""`train_rank(config)`: trains in one run folder, from scratch or from its newest valid checkpoint, until the model folder is written."""

import logging
import platform
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

import lm
from lm import collector, plugins
from lm.adapters.float8 import multiply_in_float8, require_float8
from lm.data.loader import train_loader, worker_faults
from lm.data.rows.build import build_splits
from lm.data.store.prepare import Prepared, prepare
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import CheckpointError, ConfigError, Interrupted, internal
from lm.nn.transformer import build_model
from lm.ops.defaults import why_not_mac
from lm.ops.precision import instead_of_bf16
from lm.progress import quiet
from lm.schema import Tree
from lm.storage.atomic import remove
from lm.storage.checkpoint import CheckpointReader, step_folder
from lm.storage.run_folder import RunFolder
from lm.training.callbacks.console import Console
from lm.training.commit import commit
from lm.training.config import TrainConfig
from lm.training.deterministic import deterministic
from lm.training.epochs import rows_of_epoch
from lm.training.journal import Journal
from lm.training.launch.agreement import require_same, require_same_config, require_started
from lm.training.launch.ranks import Ranks, device_kind
from lm.training.launch.signals import Signals
from lm.training.lean import leave_out_metrics
from lm.training.plan import idle_rows
from lm.training.resume import finished, imported, open_run, parent_hash, require_same_data, require_same_template, teacher_hash
from lm.training.state import Counters, RunState, Saved
from lm.training.trainer_config import TrainerConfig
from lm.training.weights.averages import on_momentum
from lm.training.weights.carried import require_state
from lm.training.weights.export import export_model
from lm.training.weights.initial import given_tokenizer, on_noise, require_fit, require_teacher
from lm.units import counted, si

if TYPE_CHECKING:
    from lightning import Callback

    from lm.training.module import TrainModule

_ENDLESS = 1 << 40  # upper bound on the loader's steps; a callback ends the run
_MOST_EPOCHS = 16  # Muennighoff et al. 2023, arXiv:2305.16264: repeating the data more often is worth nothing
_MOST_OF_FIRST = 0.05  # in an average of weights


def train_rank(cfg: TrainConfig, command: str | None = None, callbacks: Sequence["Callback"] = ()) -> Tree:
    """Trains to the last step, resuming where there is a checkpoint, and returns the summary. Raises LmError; Interrupted after a signal,
    when everything is saved.

    Every rank of a run calls it. command: the command line as typed, for the summary and the report. callbacks: further Lightning
    callbacks, called after the built-in ones but before a save; one that sets `trainer.should_stop` ends the run, with everything
    saved.
    """
    cfg.logger.require()
    cfg.strategy.require()
    folder, ranks = RunFolder(cfg.run.folder), Ranks.from_environment()
    require_started(ranks, cfg.launch)
    ranks.meet(cfg.launch.timeout_s)  # before signals are handled: a signal during this wait must end the rank
    console = Console(cfg.trainer.max_steps, silent=not ranks.first, read=cfg.data.sizes.before)
    with folder.lock() if ranks.first else nullcontext(), Signals(folder, ranks.rank) as signals:
        is_new = folder.is_new()  # asked under the lock, lest another process's run is taken for a start of ours
        try:
            return _start_or_resume(cfg, command, callbacks, console, ranks, signals)
        except BaseException:
            if is_new and ranks.first and not signals.step:  # a start that fails leaves nothing
                remove(folder.path)
            raise


def _start_or_resume(
    cfg: TrainConfig, command: str | None, callbacks: Sequence["Callback"], console: Console, ranks: Ranks, signals: Signals
) -> Tree:
    folder = RunFolder(cfg.run.folder)
    require_same_config(ranks, cfg.tree())
    newest = ranks.from_first(lambda: open_run(folder, cfg, console.say))
    reader = CheckpointReader(newest, verified=True) if newest is not None else None
    if (summary := ranks.from_first(lambda: finished(folder, cfg, reader, console.say))) is not None:
        console.say(folder.nothing_to_do(summary))
        return summary
    kind = device_kind(cfg.trainer.device, cfg.launch.devices)  # a missing GPU is told before the data are prepared
    if kind == "cuda" and cfg.trainer.float8:
        require_float8()
    with console.during("Preparing the data"):
        data = ranks.first_here(lambda: _prepare(cfg, folder, reader, console))
    held = signals.held() if command is None else nullcontext()  # a command's process ends, and need not wait
    with console.during("Loading Lightning"), collector.paused(), held:  # takes seconds, and a finished run does not need it
        leave_out_metrics()
        from lm.training.build import build_module, memory_errors

    summary = None
    with memory_errors(cfg):
        module = build_module(cfg, data, reader)
        module.run = _begin(module, data, Journal(folder, console, ranks.first), ranks, signals)
        try:
            _fit(module, callbacks)
            summary = _finish(module, command) if ranks.first else {}
        finally:
            try:
                module.run.saver.end()
            finally:
                module.run.journal.close(summary)
        return summary


def _prepare(cfg: TrainConfig, folder: RunFolder, reader: CheckpointReader | None, console: Console) -> Prepared:
    """Returns the tokenized data. The tokenizer is that of the checkpoint or the parent model where there is one, else the config's."""
    tokenizer = load_tokenizer(reader.folder) if reader is not None else given_tokenizer(cfg)
    if reader is None and isinstance(tokenizer, Tokenizer):  # a parent's. What cannot begin, or teach, is told before the data are prepared
        require_fit(model := build_model(cfg.sized_model(tokenizer.vocab_size), device="meta"), cfg)
        if cfg.init_optimizer:
            require_state(model, cfg)
    require_teacher(cfg, tokenizer)
    if reader is not None and isinstance(tokenizer, Tokenizer):
        require_same_template(folder, cfg, tokenizer)
    data = prepare(cfg.data, tokenizer, log=console.say, specials=cfg.objective.specials(), seed=cfg.seeds.data)
    if reader is not None:
        require_same_data(folder, cfg, reader.meta, data)
    return data


def _begin(module: "TrainModule", data: Prepared, journal: Journal, ranks: Ranks, signals: Signals) -> RunState:
    """Writes the config into the run folder, removes the old summary and all records newer than the checkpoint; returns the RunState."""
    cfg, reader, model_cfg = module.cfg, module.reader, module.model.cfg
    before = reader.meta if reader is not None else None
    counters = Saved.of(reader).counters if reader is not None else Counters()
    meta: Tree = {
        "model": model_cfg.tree(), "config": cfg.tree(), "fingerprint": data.fingerprint, "files": data.files,
        "tokenizer_hash": data.tokenizer.hash, "parent": cfg.init_from, "version": lm.__version__,
        "plugins": plugins.used(model_cfg), "parent_hash": parent_hash(cfg, before), "teacher_hash": teacher_hash(cfg, before),
        "adapter": cfg.adapter.tree() if cfg.adapter is not None else None,
        **imported(cfg, before),
    }  # fmt: skip
    alike = {"lm": "version", "plugins": "plugins", "init_from": "parent_hash", "teacher or reward model": "teacher_hash",
             "tokenizer": "tokenizer_hash", "data": "fingerprint"}  # fmt: skip
    require_same(ranks, {name: meta[key] for name, key in alike.items()})
    splits = build_splits(cfg.objective, cfg.data, data, model_cfg, cfg.seeds.data)
    if cfg.trainer.max_minutes is None and cfg.trainer.early_stop is None:  # else how many rows are read is not known
        splits.require(cfg.data.sizes.before(-(-cfg.trainer.max_steps // splits.train.updates)))
    if ranks.first:
        journal.folder.write_config(cfg.tree())
        journal.folder.write_plugins(plugins.files(cfg))
        journal.folder.remove_summary()
    with journal.console.during("Reading the metrics"):
        journal.go_back(module.step if reader is not None else -1, counters.samples_bytes, counters.rolled_back)
    if cfg.data.prompts() == {}:
        journal.console.say("data.sources: their prompts differ, so the model's folder keeps none")
    if meta["prompts"] and cfg.data.prompts() is None and cfg.data.shape == "alike":
        known = "; ".join(f"{name}: {text!r:.80}" for name, text in meta["prompts"].items())
        journal.console.say(f"data.record.query_prompt and document_prompt are not set, and the model knows prompts ({known})")
    described = filter(None, "\n".join([splits.train.describe(), splits.val.describe()]).splitlines())
    for line in [*plugins.unrecorded(cfg), *described]:
        journal.console.say(line)
    journal.loggers = cfg.logger.build(journal.folder.path, cfg.tree() | {"commit": commit()}, module.step) if ranks.first else []
    return RunState(cfg, ranks, signals, journal, data, splits, meta, counters)


def _fit(module: "TrainModule", callbacks: Sequence["Callback"]) -> None:
    """Runs optimizer steps until the last one, or until a signal or a callback ends the run. Raises Interrupted after a signal."""
    from lm.training.trainer import build_trainer

    cfg, run, step = module.cfg, module.run, module.step
    _describe(module)
    if run.done(step):  # the last step was saved, but the process was killed before it wrote the model
        return
    kind = device_kind(cfg.trainer.device, cfg.launch.devices)
    loader = train_loader(
        run.splits.train, seed=cfg.seeds.data, sizes=cfg.data.sizes, micro_batch=cfg.micro_batch,
        rank=run.ranks.rank // cfg.launch.ranks_per_row, world=cfg.launch.data_parallel, start_step=step + run.counters.rows_from,
        max_steps=_ENDLESS, workers=cfg.data.workers, train_rows=cfg.data.train_rows, widest_first=cfg.check, pinned=kind == "cuda",
    )  # fmt: skip
    module.model.recomputes(cfg.trainer.recomputes())
    if cfg.trainer.float8:
        run.journal.console.say(multiply_in_float8(module.model))
    for remark in _on_device(cfg.trainer, kind):
        run.journal.console.say(remark)
    if cfg.trainer.compile:
        run.journal.console.say("trainer.compile: the first step compiles, which may take minutes")
        module.model.compile()
    with _without_usual_warnings(), worker_faults(), deterministic(kind == "cuda" and cfg.trainer.deterministic):
        trainer = build_trainer(cfg, cfg.accumulation.of(step), module.strategy.lightning(), callbacks)
        with quiet(), run.signals.reaching_compiler():  # the console tells
            try:
                trainer.fit(module, train_dataloaders=loader)
            except SystemExit as error:  # a plugin's: the process would end as if all were done
                if isinstance(error.__context__, KeyboardInterrupt):  # of which Lightning makes one
                    raise error.__context__ from None
                raise internal(error) from error
    run.saver.wait()
    number = run.stopped_by
    if number is not None and not run.done(module.step):
        what = f"{signal.Signals(number).name} ended the run after step {module.step:,}, which is saved"
        raise Interrupted(f"{run.folder.path}: {what}. Train again to resume.", number)
    if module.step == 0 and run.saved_step < 0:
        raise ConfigError("callbacks: one set trainer.should_stop before the first step, so that nothing is saved. Set it later.")


def _on_device(trainer: TrainerConfig, kind: str) -> Iterator[str]:
    """Yields what would be faster on a device of this kind."""
    if trainer.precision.startswith("bf16") and (imitated := instead_of_bf16(kind)):
        yield imitated
    if trainer.device == "auto" and why_not_mac() is None:
        yield "on the CPU; trainer.device=mps tries this Mac's GPU"
    if kind == "cuda" and trainer.precision == "fp32" and not trainer.compile:
        yield "on CUDA in float32, uncompiled; trainer=gpu computes in bfloat16 and compiles, which pays in longer runs"


@contextmanager
def _without_usual_warnings() -> Iterator[None]:
    loggers = [logging.getLogger(f"lightning{name}") for name in ("", ".pytorch", ".fabric", ".pytorch.utilities.rank_zero")]
    with warnings.catch_warnings(), ExitStack() as levels:
        for logger in loggers:  # a session's own Trainer tells again what it does
            levels.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")  # autograd's thread makes the context at its first product
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # float32 beside bf16 is meant to stay float32
        yield


def _describe(module: "TrainModule") -> None:
    cfg, run, counts = module.cfg, module.run, module.counts
    shared = f", each on {cfg.launch.ranks_per_row} ranks" if cfg.launch.ranks_per_row > 1 else ""
    rows = f"{cfg.accumulation.last} x {counted(cfg.micro_batch, 'row')}{shared}"
    at = f"resumes at step {module.step:,}" if module.step else "starts"
    frozen = f" ({si(module.n_frozen)} frozen)" if module.n_frozen else ""
    active = f" ({si(counts.active)} for one token)" if counts.active < counts.parameters else ""
    n_rows = rows_of_epoch(cfg, run.splits.train)
    epochs = cfg.data.sizes.before(run.max_steps) / n_rows / run.splits.train.updates
    fewer = f"{cfg.data.ramp[0].global_batch} to " if cfg.data.ramp else ""
    texts = f" x {cfg.objective.texts} texts" if cfg.objective.texts > 1 else ""
    run.journal.console.say(
        f"{run.folder.path} {at}: {si(module.n_trained + module.n_frozen)} parameters{active}{frozen},"
        f" {si(counts.train_flops_per_token)}FLOPs/token,"
        f" {run.data.n_tokens('train'):,} train and {run.data.n_tokens('val'):,} validation tokens, {fewer}{cfg.data.global_batch}{texts} x"
        f" {cfg.data.seq_len} tokens a step ({rows}), {counted(run.max_steps, 'step')}, {epochs:.3g} epochs of {counted(n_rows, 'row')}"
    )
    for remark in filter(None, [*_on_length(cfg, run.max_steps, epochs), on_noise(cfg), on_momentum(cfg)]):
        run.journal.console.say(remark)
    if cfg.init_from is None and (idle := idle_rows(module.model.cfg.vocab_size or 0, run.data.tokenizer.vocab_size)):
        run.journal.console.say(idle)


def _on_length(cfg: TrainConfig, max_steps: int, epochs: float) -> Iterator[str]:
    """Yields what the run is too short or too long for."""
    if (end := cfg.data.phases_end()) >= max_steps:
        yield f"data: the last of its phases ends at step {end:,}, and the run at {max_steps:,}, so none follows it"
    if (first := (cfg.trainer.ema_decay or 0.0) ** max_steps) > _MOST_OF_FIRST:
        what = f"trainer.ema_decay={cfg.trainer.ema_decay}: in {counted(max_steps, 'step')} the average, which is validated and exported"
        yield f"{what}, keeps {first:.0%} of the first weights; it is for longer runs, or lower it"
    if epochs > _MOST_EPOCHS and not cfg.trainer.early_stop:
        often = f"each row comes {epochs:.0f} times, and a model learns by heart what comes that often"
        yield f"{often}: trainer.early_stop=3 ends the run where validation stops improving"


def _finish(module: "TrainModule", command: str | None) -> Tree:
    """Writes the model folder from the last checkpoint (with checkpoint.best, the best one); writes and returns the summary."""
    cfg, run, step, counts, counters = module.cfg, module.run, module.step, module.counts, module.run.counters
    best_step = counters.best_step if cfg.checkpoint.best else None  # before a resume checkpoint.best may have been set
    handed_on = step if best_step is None else best_step
    try:
        saved = CheckpointReader(step_folder(run.folder.checkpoints, handed_on), verified=handed_on == step)  # the best may be days old
    except CheckpointError as error:
        raise CheckpointError(f"{error.sentence} checkpoint.best=false hands the last on.") from None
    run.folder.require_own_model()  # again: a run that goes on takes days, beside the model that it has written before
    export_model(run.folder.model, saved, run.data.tokenizer.save, cfg.run.name)
    if handed_on != step:
        run.journal.console.say(f"{run.folder.model}: of step {handed_on:,}, whose validation was the best")
    tokens = run.tokens(step)
    summary: Tree = {
        "name": cfg.run.name, "command": command,
        "parameters": counts.parameters, "parameters_active": counts.active, "parameters_non_embedding": counts.non_embedding,
        "parameters_trained": module.n_trained,
        "flops_per_token": counts.train_flops_per_token, "cache_bytes_per_token": counts.cache_bytes_per_token,
        "steps": step, "model_step": handed_on, "stopped_early": step < run.max_steps, "tokens": tokens,
        "val_loss": counters.val_loss if best_step is None else counters.best_val_loss,
        "val_bits_per_byte": counters.val_bits_per_byte if best_step is None else counters.best_bits_per_byte,
        "zlib_bits_per_byte": run.data.zlib_bits_per_byte, **counters.test,
        "tokens_per_second": round(tokens / counters.train_s, 1) if counters.train_s else None, "train_s": round(counters.train_s, 2),
        "save_s": counters.save_s, "device": counters.device,
        "torch": torch.__version__, "python": platform.python_version(), "parent": cfg.init_from, "version": lm.__version__,
        "commit": commit(), **run.consumed(step), "teacher_hash": run.meta["teacher_hash"],
        "data_fingerprint": run.data.fingerprint, "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    run.folder.write_summary(summary)
    return summary
