"""`train(config)`: one run folder, from an empty one or from its newest valid checkpoint, to a model folder."""

import errno
import json
import platform
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

import lm
from lm import plugins
from lm.config import Tree
from lm.data.layout.mixed import consumed
from lm.data.loader import split, train_loader, worker_faults
from lm.data.rows.build import build_splits
from lm.data.store.prepare import Prepared, prepare
from lm.data.tokenizer.tokenizer import load_tokenizer
from lm.errors import CheckpointError, ConfigError, Interrupted, ResourceError
from lm.nn.cost.count import count
from lm.nn.transformer import LM, AnyModelConfig, EncoderDecoderConfig, build_model
from lm.storage.atomic import RunLock, replace_file
from lm.storage.checkpoint import CheckpointReader, step_folder
from lm.storage.model_folder import resolve_model
from lm.training.callbacks.console import Console
from lm.training.callbacks.loggers import build_loggers
from lm.training.callbacks.metrics import MetricsFile
from lm.training.callbacks.samples import truncate_samples
from lm.training.callbacks.saving import Saver
from lm.training.callbacks.session import Session
from lm.training.callbacks.signals import Signals
from lm.training.callbacks.validation import Validation
from lm.training.config import TrainConfig
from lm.training.export import export_model
from lm.training.launch.ranks import Ranks
from lm.training.optim.build import build_optimizer, vectors_of
from lm.training.progress import Progress
from lm.training.resume import SUMMARY, finished, freeze, open_run, parent_hash, require_same_data
from lm.training.strategies.build import build_strategy
from lm.training.trainer import build_trainer
from lm.training.weights import copied, drawn, empty

if TYPE_CHECKING:
    from lm.training.module import TrainModule

_ENDLESS = 1 << 40  # steps that the loader could give; the session says when it is enough


def train(cfg: TrainConfig, command: str | None = None) -> Tree:
    """Train to the end, or resume, and return the summary. Raises LmError; Interrupted after a signal, with all saved.

    Every rank of a run calls it. command: what a person typed, for the summary and the report.
    """
    folder, ranks = Path(cfg.run.dir).expanduser() / cfg.run.name, Ranks.from_environment()
    ranks.meet(cfg.launch.timeout_s)  # before signals are handled: one that comes while a rank waits in here must end it
    with RunLock(folder) if ranks.first else nullcontext(), Signals() as signals:
        return _Run(cfg, folder, ranks, signals, command).go()


class _Run:
    """The steps of `train`, in order; each leaves what the next one needs."""

    def __init__(self, cfg: TrainConfig, folder: Path, ranks: Ranks, signals: Signals, command: str | None) -> None:
        self.cfg, self.folder, self.ranks, self.signals, self.command = cfg, folder, ranks, signals, command
        self.console = Console(cfg.trainer.max_steps, silent=not ranks.first)

    def go(self) -> Tree:
        self.reader = self._open()
        summary = self.ranks.from_first(lambda: finished(self.folder, self.cfg, self.reader, self.console.say))
        if summary is not None:
            self.console.say(f"{self.folder}: finished already at step {summary['steps']:,}; nothing to do.")
            return summary
        data = self.ranks.first_here(self._prepare)
        model_cfg = self._model_config(data)
        accumulation = self._accumulation()
        with _memory_errors(self.cfg):
            self.strategy = build_strategy(self.cfg)
            model = self._build(model_cfg)
            session, module = self._session(data, model_cfg, model)
            self._describe(session, data, accumulation)
            try:
                self._fit(session, module, accumulation)
                return self._finish(session, data)
            finally:
                for logger in session.loggers:
                    logger.close()

    def _open(self) -> CheckpointReader | None:
        """The checkpoint to go on from, which rank 0 chooses and verifies."""
        found: list[CheckpointReader | None] = []

        def choose() -> Path | None:
            found.append(open_run(self.folder, self.cfg, self.console.say))
            return found[0].folder if found[0] is not None else None

        path = self.ranks.from_first(choose)
        return found[0] if found else CheckpointReader(path, verified=True) if path is not None else None

    def _prepare(self) -> Prepared:
        source = str(self.reader.folder) if self.reader is not None else self.cfg.init_from
        tokenizer = load_tokenizer(resolve_model(source)) if source is not None else self.cfg.tokenizer
        data = prepare(self.cfg.data, tokenizer, log=self.console.say, specials=self.cfg.objective.specials())
        if self.reader is not None:
            require_same_data(self.folder, self.cfg, self.reader.meta, data)
        return data

    def _model_config(self, data: Prepared) -> AnyModelConfig:
        """With vocab_size and max_seq_len filled in, checked against the tokenizer."""
        cfg, size = self.cfg.model, data.tokenizer.vocab_size
        vocab_size = cfg.vocab_size or -(-size // 64) * 64
        if vocab_size < size and self.cfg.init_from is not None:
            raise CheckpointError(
                f"{self.cfg.init_from}: the embedding has {vocab_size} rows, fewer than the tokenizer's {size} tokens."
                " Use the tokenizer that it was trained with."
            )
        if vocab_size < size:
            raise ConfigError(
                f"model.vocab_size={vocab_size} is below the tokenizer's {size} tokens. Set it to null, or to {size} or more."
            )
        sizes: Tree = {"vocab_size": vocab_size, "max_seq_len": cfg.max_seq_len or self.cfg.data.seq_len}
        if isinstance(cfg, EncoderDecoderConfig):
            sizes["start_token"] = cfg.start_token if cfg.start_token is not None else data.tokenizer.start
        return cfg.replace(**sizes)

    def _accumulation(self) -> int:
        self.micro_batch, accumulation = split(self.cfg.data.global_batch, self.ranks.world, self.cfg.trainer.micro_batch)
        return accumulation

    def _build(self, model_cfg: AnyModelConfig) -> LM:
        """Filled, or on the meta device where the strategy fills it part by part."""
        cfg = self.cfg
        self.fill = empty if self.reader is not None else drawn(cfg.seed) if cfg.init_from is None else copied(cfg.init_from)
        model = self._in_precision(build_model(model_cfg, device="meta" if self.strategy.meta else "cpu"))
        if not self.strategy.meta:
            self.fill(model, {name for name, _ in model.named_parameters()})
        return model

    def _in_precision(self, model: LM) -> LM:
        """As Lightning converts it, but before the weights are read, so that a model that is only written again has the same dtype."""
        return model.to(torch.bfloat16) if self.cfg.trainer.precision == "bf16-true" else model

    def _session(self, data: Prepared, model_cfg: AnyModelConfig, model: LM) -> tuple[Session, "TrainModule"]:
        from lm.training.module import TrainModule  # Lightning takes seconds, and a finished run does not need it

        cfg, first = self.cfg, self.ranks.first
        step = int(self.reader.meta["step"]) if self.reader is not None else 0
        metrics = MetricsFile(self.folder / "metrics.jsonl")
        progress = Progress(**self.reader.meta["progress"]) if self.reader is not None else Progress()
        if first:
            freeze(self.folder, cfg)
            metrics.truncate(step if self.reader is not None else -1)
            truncate_samples(self.folder / "samples.md", progress.samples_bytes)
        meta: Tree = {
            "model": model_cfg.tree(), "config": cfg.tree(), "fingerprint": data.fingerprint, "files": data.files,
            "tokenizer_hash": data.tokenizer.hash, "parent": cfg.init_from, "version": lm.__version__, "plugins": plugins.used(model_cfg),
            "parent_hash": parent_hash(cfg, self.reader.meta if self.reader is not None else None),
        }  # fmt: skip
        rows, val_rows, val_sets = build_splits(cfg.objective, cfg.data, data, model_cfg, cfg.seed)
        for line in filter(None, "\n".join([rows.describe(), val_rows.describe()]).splitlines()):
            self.console.say(line)
        loggers = build_loggers(cfg.logger, self.folder, cfg.tree(), step) if first else []
        where = cfg.checkpoint
        saver = Saver(self.folder / "checkpoints", where.keep_last, self.ranks, data.tokenizer.save, where.background)
        validation = Validation(cfg, model, data.tokenizer, val_rows, val_sets, self.ranks)
        session = Session(
            cfg=cfg, folder=self.folder, model=model, rows=rows, validation=validation,
            counts=count(model_cfg, cfg.data.seq_len), console=self.console, loggers=loggers, metrics=metrics, signals=self.signals,
            meta=meta, progress=progress, ranks=self.ranks, saver=saver, reader=self.reader,
        )  # fmt: skip
        matrices, vectors = model.matrices(), vectors_of(model.named_parameters())

        def build() -> Optimizer:
            return build_optimizer(cfg.optim, model.named_parameters(), matrices, vectors)

        module = TrainModule(cfg, model, build, session.after_step, session.start, step, self.strategy, self.fill)
        session.attach(module)
        return session, module

    def _describe(self, session: Session, data: Prepared, accumulation: int) -> None:
        counts, cfg = session.counts, self.cfg
        at = f"resumes at step {session.module.step:,}" if session.module.step else "starts"
        self.console.say(
            f"{self.folder} {at}: {counts.parameters / 1e6:.2f} M parameters, {counts.train_flops_per_token / 1e6:.1f} MFLOPs/token,"
            f" {data.n_tokens('train'):,} train and {data.n_tokens('val'):,} validation tokens, {cfg.data.global_batch} x"
            f" {cfg.data.seq_len} tokens a step ({accumulation} x {self.micro_batch} rows), {cfg.trainer.max_steps:,} steps"
        )

    def _fit(self, session: Session, module: "TrainModule", accumulation: int) -> None:
        cfg, step = self.cfg, module.step
        if session.done:  # killed before the model was written
            return
        loader = train_loader(
            session.rows, seed=cfg.seed, global_batch=cfg.data.global_batch, micro_batch=self.micro_batch, rank=self.ranks.rank,
            world=self.ranks.world, start_step=step + session.progress.rows_from, max_steps=_ENDLESS, workers=cfg.data.workers,
            widest_first=cfg.check,
        )  # fmt: skip
        session.model.checkpoint_blocks(cfg.trainer.checkpoint_blocks or 0)
        if cfg.trainer.compile:
            session.model.compile()
        trainer = build_trainer(cfg, accumulation, module.strategy.lightning())
        with warnings.catch_warnings(), worker_faults():
            warnings.filterwarnings("ignore", module="lightning")
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
            trainer.fit(module, train_dataloaders=loader)
        session.saver.wait()
        number = session.stopped_by
        if number is not None and not session.done:
            what = f"{signal.Signals(number).name} ended the run after step {module.step:,}, which is saved"
            raise Interrupted(f"{self.folder}: {what}. Train again to resume.", number)

    def _finish(self, session: Session, data: Prepared) -> Tree:
        cfg, p, counts = self.cfg, session.progress, session.counts
        extra: Tree = {
            "parent": cfg.init_from, "run": cfg.run.name, "step": session.module.step, "tokenizer_hash": data.tokenizer.hash,
            "plugins": plugins.used(session.model.cfg),
        }  # fmt: skip
        if not self.ranks.first:
            return {}
        saved = step_folder(self.folder / "checkpoints", session.module.step)
        export_model(self.folder / "model", CheckpointReader(saved, verified=True), data.tokenizer.save, extra)
        tokens = session.module.step * cfg.data.global_batch * cfg.data.seq_len
        summary: Tree = {
            "name": cfg.run.name, "command": self.command,
            "parameters": counts.parameters, "parameters_non_embedding": counts.non_embedding,
            "flops_per_token": counts.train_flops_per_token, "cache_bytes_per_token": counts.cache_bytes_per_token,
            "steps": session.module.step, "stopped_early": session.module.step < cfg.trainer.max_steps, "tokens": tokens,
            "val_loss": p.val_loss, "val_bits_per_byte": p.val_bits_per_byte, "zlib_bits_per_byte": data.zlib_bits_per_byte,
            "tokens_per_second": round(tokens / p.train_s, 1) if p.train_s else None, "train_s": round(p.train_s, 2),
            "save_s": p.save_s, "device": p.device,
            "torch": torch.__version__, "python": platform.python_version(), "parent": cfg.init_from, "version": lm.__version__,
            **consumed(session.rows, session.module.step + p.rows_from, cfg.data),
            "data_fingerprint": data.fingerprint, "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip
        replace_file(self.folder / SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False))
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
