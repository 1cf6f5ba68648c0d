"""`train(config)`: one run folder, from an empty one or from its newest valid checkpoint, to a model folder."""

import errno
import platform
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import lm
from lm import plugins
from lm.data.loader import split, train_loader, worker_faults
from lm.data.rows.build import build_splits
from lm.data.store.prepare import Prepared, prepare
from lm.data.tokenizer.tokenizer import load_tokenizer
from lm.errors import CheckpointError, ConfigError, Interrupted, ResourceError
from lm.nn.transformer import EncoderDecoderConfig, ModelConfig, build_model
from lm.schema import Tree
from lm.storage.checkpoint import CheckpointReader, step_folder
from lm.storage.model_folder import resolve_model
from lm.storage.run_folder import RunFolder
from lm.training.callbacks.console import Console
from lm.training.config import TrainConfig
from lm.training.counters import Counters
from lm.training.export import export_model
from lm.training.journal import Journal
from lm.training.launch.ranks import Ranks
from lm.training.launch.signals import Signals
from lm.training.resume import finished, open_run, parent_hash, require_same_data
from lm.training.state import RunState
from lm.training.weights import copied, drawn, empty

if TYPE_CHECKING:  # Lightning takes seconds, and a finished run does not need it
    from lightning import Callback

    from lm.training.module import TrainModule

_ENDLESS = 1 << 40  # steps that the loader could give; a callback says when it is enough


def train(cfg: TrainConfig, command: str | None = None, callbacks: Sequence["Callback"] = ()) -> Tree:
    """Trains to the end, or resumes, and returns the summary. Raises LmError; Interrupted after a signal, with all saved.

    Every rank of a run calls it. command: what a person typed, for the summary and the report. callbacks: Lightning's or one's own,
    which come behind ours; one that sets `trainer.should_stop` on every rank ends the run, with all saved.
    """
    folder, ranks = RunFolder(cfg.run.folder), Ranks.from_environment()
    ranks.meet(cfg.launch.timeout_s)  # before signals are handled: one that comes while a rank waits in here must end it
    console = Console(cfg.trainer.max_steps, silent=not ranks.first)
    with folder.lock() if ranks.first else nullcontext(), Signals() as signals:
        reader = _open(cfg, folder, ranks, console)
        if (summary := ranks.from_first(lambda: finished(folder, cfg, reader, console.say))) is not None:
            console.say(f"{folder.path}: finished already at step {summary['steps']:,}; nothing to do.")
            return summary
        data = ranks.first_here(lambda: _prepare(cfg, folder, reader, console))
        with _memory_errors(cfg):
            model_cfg = _model_config(cfg, data)
            module = _build(cfg, model_cfg, reader)
            module.run = _begin(module, data, Journal(folder, console, ranks.first), ranks, signals)
            try:
                _fit(module, callbacks)
                return _finish(module, command) if ranks.first else {}
            finally:
                module.run.journal.close()


def _open(cfg: TrainConfig, folder: RunFolder, ranks: Ranks, console: Console) -> CheckpointReader | None:
    """The checkpoint to go on from, which rank 0 chooses and verifies."""
    found: list[CheckpointReader | None] = []

    def choose() -> Path | None:
        found.append(open_run(folder, cfg, console.say))
        return found[0].folder if found[0] is not None else None

    path = ranks.from_first(choose)
    return found[0] if found else CheckpointReader(path, verified=True) if path is not None else None


def _prepare(cfg: TrainConfig, folder: RunFolder, reader: CheckpointReader | None, console: Console) -> Prepared:
    """The tokens, by the tokenizer of the checkpoint or of the parent where there is one."""
    source = str(reader.folder) if reader is not None else cfg.init_from
    tokenizer = load_tokenizer(resolve_model(source)) if source is not None else cfg.tokenizer
    data = prepare(cfg.data, tokenizer, log=console.say, specials=cfg.objective.specials())
    if reader is not None:
        require_same_data(folder, cfg, reader.meta, data)
    return data


def _model_config(run: TrainConfig, data: Prepared) -> ModelConfig:
    """With vocab_size and max_seq_len filled in, checked against the tokenizer."""
    cfg, size = run.model, data.tokenizer.vocab_size
    vocab_size = cfg.vocab_size or -(-size // 64) * 64
    if vocab_size < size and run.init_from is not None:
        raise CheckpointError(
            f"{run.init_from}: the embedding has {vocab_size} rows, fewer than the tokenizer's {size} tokens."
            " Use the tokenizer that it was trained with."
        )
    if vocab_size < size:
        raise ConfigError(f"model.vocab_size={vocab_size} is below the tokenizer's {size} tokens. Set it to null, or to {size} or more.")
    sizes: Tree = {"vocab_size": vocab_size, "max_seq_len": cfg.max_seq_len or run.data.seq_len}
    if isinstance(cfg, EncoderDecoderConfig):
        sizes["start_token"] = cfg.start_token if cfg.start_token is not None else data.tokenizer.start
    return cfg.replace(**sizes)


def _build(cfg: TrainConfig, model_cfg: ModelConfig, reader: CheckpointReader | None) -> "TrainModule":
    """The model filled, or on the meta device where the strategy fills it part by part."""
    from lm.training.module import TrainModule

    strategy = cfg.strategy.build(cfg)
    fill = empty if reader is not None else drawn(cfg.seed) if cfg.init_from is None else copied(cfg.init_from)
    model = build_model(model_cfg, device="meta" if strategy.meta else "cpu")
    if cfg.trainer.precision == "bf16-true":  # as Lightning converts it, but before the weights are read, so that a model that is
        model = model.to(torch.bfloat16)  # only written again has the same dtype
    if not strategy.meta:
        fill(model, {name for name, _ in model.named_parameters()})
    return TrainModule(cfg, model, strategy, fill, reader)


def _begin(module: "TrainModule", data: Prepared, journal: Journal, ranks: Ranks, signals: Signals) -> RunState:
    """The folder is this config's from now on, its run unfinished, and nothing in it is newer than the checkpoint."""
    cfg, reader, model_cfg = module.cfg, module.reader, module.model.cfg
    counters = Counters(**reader.meta["counters"]) if reader is not None else Counters()
    if ranks.first:
        journal.folder.write_config(cfg.tree())
        journal.folder.remove_summary()
    journal.go_back(module.step if reader is not None else -1, counters.samples_bytes)
    meta: Tree = {
        "model": model_cfg.tree(), "config": cfg.tree(), "fingerprint": data.fingerprint, "files": data.files,
        "tokenizer_hash": data.tokenizer.hash, "parent": cfg.init_from, "version": lm.__version__,
        "plugins": plugins.used(model_cfg), "parent_hash": parent_hash(cfg, reader.meta if reader is not None else None),
    }  # fmt: skip
    splits = build_splits(cfg.objective, cfg.data, data, model_cfg, cfg.seed)
    for line in filter(None, "\n".join([splits.train.describe(), splits.val.describe()]).splitlines()):
        journal.console.say(line)
    journal.loggers = cfg.logger.build(journal.folder.path, cfg.tree(), module.step) if ranks.first else []
    return RunState(cfg, ranks, signals, journal, data, splits, meta, counters)


def _fit(module: "TrainModule", callbacks: Sequence["Callback"]) -> None:
    """Steps to the end, or until a signal or a callback ends them."""
    from lm.training.trainer import build_trainer

    cfg, run, step = module.cfg, module.run, module.step
    micro_batch, accumulation = split(cfg.data.global_batch, run.ranks.world, cfg.trainer.micro_batch)
    _describe(module, f"{accumulation} x {micro_batch} rows")
    if run.done(step):  # killed before the model was written
        return
    loader = train_loader(
        run.splits.train, seed=cfg.seed, global_batch=cfg.data.global_batch, micro_batch=micro_batch, rank=run.ranks.rank,
        world=run.ranks.world, start_step=step + run.counters.rows_from, max_steps=_ENDLESS, workers=cfg.data.workers,
        widest_first=cfg.check,
    )  # fmt: skip
    module.model.checkpoint_blocks(cfg.trainer.checkpoint_blocks or 0)
    if cfg.trainer.compile:
        module.model.compile()
    added = [*(callback.build() for callback in cfg.callbacks.values()), *callbacks]
    trainer = build_trainer(cfg, accumulation, module.strategy.lightning(), [*_callbacks(), *added])
    with warnings.catch_warnings(), worker_faults():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        trainer.fit(module, train_dataloaders=loader)
    run.saver.wait()
    number = run.stopped_by
    if number is not None and not run.done(module.step):
        what = f"{signal.Signals(number).name} ended the run after step {module.step:,}, which is saved"
        raise Interrupted(f"{run.folder.path}: {what}. Train again to resume.", number)


def _callbacks() -> list["Callback"]:
    """What happens between steps, in this order: averages first, which a later one may validate; the bad step before the line that may
    take the run back; and last the save, which holds what the others have counted, and ends the run."""
    from lm.training.callbacks.averages import Averages
    from lm.training.callbacks.bad_steps import BadSteps, Rollback
    from lm.training.callbacks.checkpoints import Checkpoints
    from lm.training.callbacks.metrics import Metrics
    from lm.training.callbacks.samples import Samples
    from lm.training.callbacks.signals import StopOnSignal
    from lm.training.callbacks.validation import Validation

    return [Averages(), StopOnSignal(), BadSteps(), Metrics(), Rollback(), Validation(), Samples(), Checkpoints()]


def _describe(module: "TrainModule", rows: str) -> None:
    cfg, run, counts = module.cfg, module.run, module.counts
    at = f"resumes at step {module.step:,}" if module.step else "starts"
    still = counts.parameters - module.n_trained
    run.journal.console.say(
        f"{run.folder.path} {at}: {counts.parameters / 1e6:.2f} M parameters{f' ({still / 1e6:.2f} M frozen)' if still else ''},"
        f" {counts.train_flops_per_token / 1e6:.1f} MFLOPs/token,"
        f" {run.data.n_tokens('train'):,} train and {run.data.n_tokens('val'):,} validation tokens, {cfg.data.global_batch} x"
        f" {cfg.data.seq_len} tokens a step ({rows}), {cfg.trainer.max_steps:,} steps"
    )


def _finish(module: "TrainModule", command: str | None) -> Tree:
    """The model folder, out of the last checkpoint, and the summary."""
    cfg, run, step, counts, p = module.cfg, module.run, module.step, module.counts, module.run.counters
    extra: Tree = {
        "parent": cfg.init_from, "run": cfg.run.name, "step": step, "tokenizer_hash": run.data.tokenizer.hash,
        "plugins": plugins.used(module.model.cfg),
    }  # fmt: skip
    saved = CheckpointReader(step_folder(run.folder.checkpoints, step), verified=True)
    export_model(run.folder.model, saved, run.data.tokenizer.save, extra)
    tokens = run.tokens(step)
    summary: Tree = {
        "name": cfg.run.name, "command": command,
        "parameters": counts.parameters, "parameters_non_embedding": counts.non_embedding, "parameters_trained": module.n_trained,
        "flops_per_token": counts.train_flops_per_token, "cache_bytes_per_token": counts.cache_bytes_per_token,
        "steps": step, "stopped_early": step < cfg.trainer.max_steps, "tokens": tokens,
        "val_loss": p.val_loss, "val_bits_per_byte": p.val_bits_per_byte, "zlib_bits_per_byte": run.data.zlib_bits_per_byte,
        "tokens_per_second": round(tokens / p.train_s, 1) if p.train_s else None, "train_s": round(p.train_s, 2),
        "save_s": p.save_s, "device": p.device,
        "torch": torch.__version__, "python": platform.python_version(), "parent": cfg.init_from, "version": lm.__version__,
        **run.consumed(step),
        "data_fingerprint": run.data.fingerprint, "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    run.folder.write_summary(summary)
    return summary


@contextmanager
def _memory_errors(cfg: TrainConfig) -> Iterator[None]:
    """What torch, numpy and the system say where memory runs out becomes a ResourceError."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else "MemoryError"
        refused = "allocate" in str(error) or "out of memory" in str(error).lower() or getattr(error, "errno", None) == errno.ENOMEM
        if not isinstance(error, MemoryError) and not refused:
            raise
        raise ResourceError(
            f"train: out of memory with trainer.micro_batch={cfg.trainer.micro_batch} and data.seq_len={cfg.data.seq_len} ({reason})."
            " Lower one of them, or the model's size; earlier checkpoints are kept."
        ) from error
