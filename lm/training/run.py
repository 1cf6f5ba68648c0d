"""`train(config)`: one run folder, from an empty one or from its newest valid checkpoint, to a model folder."""

import logging
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml

import lm
from lm.checkpoint import CheckpointReader, newest_valid
from lm.config import Tree, from_tree
from lm.data.causal import CausalRows
from lm.data.loader import split, train_loader
from lm.data.prepare import Prepared, changed_files, prepare
from lm.data.tokenizer import load_tokenizer
from lm.errors import CheckpointError, ConfigError, Interrupted, ResourceError
from lm.folder import RunLock, clean, disk_errors, read_json, verify, write_json
from lm.model_folder import read_model, resolve_model, save_model
from lm.nn.count import count
from lm.nn.transformer import DecoderLM, ModelConfig, build_model
from lm.training.config import TrainConfig
from lm.training.logging import Console, build_loggers
from lm.training.metrics import MetricsFile
from lm.training.module import TrainModule
from lm.training.optim import build_optimizer
from lm.training.resume import require_same_run
from lm.training.session import Progress, Session, truncate_samples
from lm.training.signals import Signals
from lm.training.state import EMA, load_optimizer, load_weights, require_same_shapes

_PRECISION = {"fp32": "32-true", "bf16-mixed": "bf16-mixed", "bf16-true": "bf16-true"}


def train(cfg: TrainConfig) -> Tree:
    """Train to the end, or resume, and return the summary. Raises LmError; Interrupted after a signal, with all saved."""
    folder = Path(cfg.run.dir).expanduser() / cfg.run.name
    with RunLock(folder), Signals() as signals:
        return _Run(cfg, folder, signals).go()


class _Run:
    """The steps of `train`, in order; each leaves what the next one needs."""

    def __init__(self, cfg: TrainConfig, folder: Path, signals: Signals) -> None:
        self.cfg, self.folder, self.signals = cfg, folder, signals
        self.console = Console(cfg.trainer.max_steps)

    def go(self) -> Tree:
        self.reader = self._open_folder()
        done = self._finished()
        if done is not None:
            self.console.say(f"{self.folder}: finished already at step {done['steps']:,}; nothing to do.")
            return done
        data = self._prepare()
        model_cfg = self._model_config(data)
        accumulation = self._accumulation()
        model = self._build(model_cfg)
        session, module = self._session(data, model_cfg, model)
        self._describe(session, data, accumulation)
        self._fit(session, module, data, accumulation)
        return self._finish(session, data)

    def _open_folder(self) -> CheckpointReader | None:
        """Compare with what the folder holds, or start it; the checkpoint to resume, if there is one."""
        path, tree = self.folder / "config.yaml", self.cfg.tree()
        checkpoints = self.folder / "checkpoints"
        clean(self.folder)
        clean(checkpoints)
        if path.exists():
            require_same_run(path, tree)
        newest, rejected = newest_valid(checkpoints)
        for reason in rejected:
            self.console.say(f"not used: {reason}")
        if newest is None and self.cfg.resume.mode == "must":
            raise CheckpointError(f"{self.folder}: resume.mode=must, but there is no valid checkpoint. Use resume.mode=auto to start anew.")
        with disk_errors(path):
            path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
        return CheckpointReader(newest) if newest is not None else None

    def _finished(self) -> Tree | None:
        summary = self.folder / "summary.json"
        if self.reader is None or not summary.exists() or not (self.folder / "model").is_dir():
            return None
        found = read_json(summary)
        at_end = found.get("steps") == self.reader.meta["step"] and (self.reader.meta["step"] >= self.cfg.trainer.max_steps or found["stopped_early"])
        if at_end:
            verify(self.folder / "model")
        return found if at_end else None

    def _prepare(self) -> Prepared:
        source = self.cfg.init_from or (str(self.reader.folder) if self.reader is not None else None)
        tokenizer = load_tokenizer(resolve_model(source)) if source is not None else self.cfg.tokenizer
        data = prepare(self.cfg.data, tokenizer, log=self.console.say)
        if self.reader is not None:
            self._require_same_data(self.reader.meta, data)
        return data

    def _require_same_data(self, meta: Tree, data: Prepared) -> None:
        if meta["tokenizer_hash"] != data.tokenizer.hash:
            raise CheckpointError(f"{self.folder}: the tokenizer is not the one that the run started with. Restore it, or start another run.")
        if meta["fingerprint"] != data.fingerprint:
            what = next(iter(changed_files(meta["files"], data.files)), "the data has changed")
            raise ConfigError(f"{self.folder}: {what} since the run started, and a resumed run needs the same data. Restore it, or set run.name.")

    def _model_config(self, data: Prepared) -> ModelConfig:
        """With vocab_size and max_seq_len filled in, checked against the tokenizer."""
        cfg, size = self.cfg.model, data.tokenizer.vocab_size
        vocab_size = cfg.vocab_size or -(-size // 64) * 64
        if vocab_size < size:
            raise ConfigError(
                f"model.vocab_size={vocab_size} is below the tokenizer's {size} tokens. Set it to null, or to {size} or more."
            ) if self.cfg.init_from is None else CheckpointError(
                f"{self.cfg.init_from}: the embedding has {vocab_size} rows, fewer than the tokenizer's {size} tokens. Use its own tokenizer."
            )
        return cfg.replace(vocab_size=vocab_size, max_seq_len=cfg.max_seq_len or self.cfg.data.seq_len)

    def _accumulation(self) -> int:
        self.micro_batch, accumulation = split(self.cfg.data.global_batch, 1, self.cfg.trainer.micro_batch)
        return accumulation

    def _build(self, model_cfg: ModelConfig) -> DecoderLM:
        if self.reader is None and self.cfg.init_from is None:
            return build_model(model_cfg, seed=self.cfg.seed)
        model = build_model(model_cfg)
        if self.reader is not None:
            if (saved := from_tree(type(model_cfg), self.reader.meta["model"])) != model_cfg:
                raise CheckpointError(f"{self.reader.folder}: was saved with another model: {saved.tree()}. Set run.name to start a new run.")
            load_weights(model.named_parameters(), self.reader)
        elif self.cfg.init_from is not None:
            source = resolve_model(self.cfg.init_from)
            _, weights = read_model(source)
            own = dict(model.named_parameters())
            require_same_shapes({n: tuple(p.shape) for n, p in own.items()}, {n: tuple(w.shape) for n, w in weights.items()}, str(source))
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(weights[name])
        return model

    def _session(self, data: Prepared, model_cfg: ModelConfig, model: DecoderLM) -> tuple[Session, TrainModule]:
        cfg = self.cfg
        step = int(self.reader.meta["step"]) if self.reader is not None else 0
        metrics = MetricsFile(self.folder / "metrics.jsonl")
        metrics.truncate(step)
        truncate_samples(self.folder / "samples.md", step)
        meta: Tree = {
            "model": model_cfg.tree(), "config": cfg.tree(), "fingerprint": data.fingerprint, "files": data.files,
            "tokenizer_hash": data.tokenizer.hash, "parent": cfg.init_from, "version": lm.__version__,
        }  # fmt: skip
        self.rows = CausalRows(data.train, data.tokenizer, cfg.data.seq_len, cfg.data.mask_documents)
        val_rows = CausalRows(data.val, data.tokenizer, cfg.data.seq_len, cfg.data.mask_documents)
        counts = count(model_cfg, cfg.data.seq_len)
        loggers = build_loggers(cfg.logger, self.folder, cfg.tree(), step)
        session = Session(
            cfg, self.folder, model, data.tokenizer, val_rows, counts, self.console, loggers, metrics, self.signals, meta
        )
        if self.reader is not None:
            session.progress = Progress(**self.reader.meta["progress"])
            session.last_saved = step
        module = TrainModule(cfg, model, self._optimizer(session), session.after_step, session.start, step)
        session.attach(module)
        return session, module

    def _optimizer(self, session: Session) -> Any:
        def build() -> torch.optim.Optimizer:
            optimizer = build_optimizer(self.cfg.optim, session.model.named_parameters(), session.model.matrices())
            if self.cfg.trainer.ema_decay is not None:
                session.ema = EMA(session.model.named_parameters(), self.cfg.trainer.ema_decay)
            if self.reader is not None and not self.cfg.resume.fresh_optimizer:
                load_optimizer(optimizer, self.reader)
            if self.reader is not None and session.ema is not None:
                session.ema.load(self.reader)
            return optimizer

        return build

    def _describe(self, session: Session, data: Prepared, accumulation: int) -> None:
        counts, cfg = session.counts, self.cfg
        at = f"resumes at step {session.module.step:,}" if session.module.step else "starts"
        self.console.say(
            f"{self.folder} {at}: {counts.parameters / 1e6:.2f} M parameters, {counts.train_flops_per_token / 1e6:.1f} MFLOPs/token,"
            f" {data.train.n_tokens / 1e6:.2f} M train and {data.val.n_tokens / 1e6:.2f} M validation tokens,"
            f" {cfg.data.global_batch} x {cfg.data.seq_len} tokens a step ({accumulation} x {self.micro_batch} rows), {cfg.trainer.max_steps:,} steps"
        )

    def _fit(self, session: Session, module: TrainModule, data: Prepared, accumulation: int) -> None:
        cfg, step = self.cfg, module.step
        if step >= cfg.trainer.max_steps:
            return
        loader = train_loader(
            self.rows, seed=cfg.seed, global_batch=cfg.data.global_batch, micro_batch=self.micro_batch, rank=0, world=1,
            start_step=step, max_steps=cfg.trainer.max_steps, workers=cfg.data.workers,
        )  # fmt: skip
        if cfg.trainer.compile:
            session.model.compile()
        trainer = _trainer(cfg, cfg.trainer.max_steps - step, accumulation)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", module="lightning")
                trainer.fit(module, train_dataloaders=loader)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(str(error)) from error
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "alloc" in str(error).lower():
                raise self._out_of_memory(str(error)) from error
            raise
        finally:
            for logger in session.loggers:
                logger.close()
        if self.signals.received is not None and module.step < cfg.trainer.max_steps:
            raise Interrupted(f"{self.folder}: stopped by a signal after step {module.step:,}, which is saved. Run the same command to resume.", self.signals.received)

    def _out_of_memory(self, reason: str) -> ResourceError:
        t = self.cfg
        return ResourceError(
            f"train: out of memory with trainer.micro_batch={t.trainer.micro_batch} and data.seq_len={t.data.seq_len}"
            f" ({reason.splitlines()[0][:80] if reason else 'MemoryError'}). Lower trainer.micro_batch; earlier checkpoints are kept."
        )

    def _finish(self, session: Session, data: Prepared) -> Tree:
        cfg, p, counts = self.cfg, session.progress, session.counts
        extra = {"parent": cfg.init_from, "run": cfg.run.name, "step": session.module.step, "tokenizer_hash": data.tokenizer.hash}
        session.exported(lambda weights: save_model(self.folder / "model", session.meta["model"], weights, data.tokenizer.save, extra))
        tokens = session.module.step * cfg.data.global_batch * cfg.data.seq_len
        device = torch.cuda.get_device_name() if session.module.device.type == "cuda" else f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
        summary: Tree = {
            "name": cfg.run.name, "parameters": counts.parameters, "parameters_non_embedding": counts.non_embedding,
            "flops_per_token": counts.train_flops_per_token, "cache_bytes_per_token": counts.cache_bytes_per_token,
            "steps": session.module.step, "stopped_early": session.stopped_early, "tokens": tokens, "val_loss": p.val_loss,
            "val_bits_per_byte": p.val_bits_per_byte, "zlib_bits_per_byte": data.zlib_bits_per_byte,
            "tokens_per_second": round(tokens / p.train_s, 1) if p.train_s else None, "train_s": round(p.train_s, 2), "device": device,
            "torch": torch.__version__, "python": platform.python_version(), "parent": cfg.init_from, "version": lm.__version__,
            "data_fingerprint": data.fingerprint, "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip
        with disk_errors(self.folder / "summary.json"):
            write_json(self.folder / "summary.json", summary)
        return summary


def _trainer(cfg: TrainConfig, steps: int, accumulation: int) -> Any:
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from lightning import Trainer

    cuda = cfg.trainer.device == "cuda" or (cfg.trainer.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch finds no GPU here. Use trainer.device=auto or cpu.")
    precision: Any = _PRECISION[cfg.trainer.precision]
    return Trainer(
        accelerator="cuda" if cuda else "cpu", devices=1, precision=precision, max_steps=steps, max_epochs=-1, min_epochs=0,
        accumulate_grad_batches=accumulation, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0, use_distributed_sampler=False,
    )  # fmt: skip
