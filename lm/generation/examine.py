"""A model on data: what `lm eval` prints and `lm.evaluate` returns."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NotRequired, Self

from lm import plugins
from lm.data.kinds import DataConfig, ObjectiveConfig
from lm.data.order import spread
from lm.data.rows.base import usual
from lm.data.rows.build import build_rows
from lm.data.store.prepare import Prepared, prepare
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import CheckpointError, ConfigError, NumericsError
from lm.generation.evaluate import Evaluation
from lm.generation.evaluate import evaluate as evaluate_rows
from lm.generation.load import load
from lm.nn.transformer import LM
from lm.schema import Config, from_tree
from lm.storage.model_folder import resolve_model
from lm.storage.run_folder import RunFolder

Split = Literal["val", "train", "all"]


class Examination(Evaluation):
    """`zlib_bits_per_byte`: what zlib at level 9 needs of the validation text, where that alone was read."""

    zlib_bits_per_byte: NotRequired[float]


class Examined(Config):
    """What a model is examined on."""

    data: DataConfig
    objective: ObjectiveConfig | None = None

    @classmethod
    def of_run(cls, run: RunFolder) -> Self:
        """Raises CheckpointError where the run's config cannot be read, ConfigError where it needs a plugin."""
        tree = run.config()
        try:
            return from_tree(cls, {key: tree[key] for key in cls.model_fields if key in tree})
        except ConfigError as error:
            plugins.require(tree, run.config_file)
            raise CheckpointError(f"{run.config_file}: its data cannot be read ({error}). Restore the file, or give data=...") from None


def evaluate(
    model: str | Path | tuple[LM, Tokenizer],
    data: DataConfig | None = None,
    objective: ObjectiveConfig | None = None,
    *,
    split: Split = "val",
    micro_batch: int = 8,
    device: str = "auto",
    log: Callable[[str], None] = lambda line: None,
) -> Examination:
    """Loss (nats per predicted token) and bits per byte of a model on data.

    model: a run, model or checkpoint folder, or what `lm.load` returned. data: such as `lm.config(overrides=["data=wikitext103"]).data`,
    with rows of its `seq_len`; None: the data and the objective of the run that the folder belongs to. objective: None: what models of
    this kind are mostly trained for. split: the part that training would hold out, the one that it would read, or both.
    Raises ConfigError where data, objective and model do not fit, CheckpointError where the folder cannot be read, NumericsError for a loss
    that is not finite.
    """
    if data is None:
        run = RunFolder.around(resolve_model(str(model))) if not isinstance(model, tuple) else None
        if run is None:
            raise ConfigError("data: the model is in no run folder, so the data must be given. Pass data=lm.config(...).data.")
        of_run = Examined.of_run(run)
        data, objective = of_run.data, objective or of_run.objective
    lm, tokenizer = model if isinstance(model, tuple) else load(model, device)
    objective = objective or usual(lm.cfg.kind)
    try:
        objective.require_fit(lm.cfg.kind, data)
    except ValueError as error:
        raise ConfigError(f"objective: {error}") from None
    if data.seq_len > lm.max_seq_len:
        raise ConfigError(f"data.seq_len={data.seq_len} is over model.max_seq_len={lm.max_seq_len}. Lower it, or leave it out.")
    prepared = prepare(data, tokenizer, log=log)
    all_rows = [build_rows(objective, data, store, tokenizer, lm.cfg) for store in _stores(prepared, split)]
    parts = [evaluate_rows(lm, rows, spread(len(rows), data.val_rows), tokenizer, micro_batch) for rows in all_rows]
    tokens, n_bytes = sum(part["tokens"] for part in parts), sum(part["bytes"] for part in parts)
    loss = sum(part["val_loss"] * part["tokens"] for part in parts) / tokens
    bits = sum(part["val_bits_per_byte"] * part["bytes"] for part in parts) / n_bytes
    if not math.isfinite(loss):
        raise NumericsError(f"eval: the loss is {loss} over {tokens:,} tokens, and only finite ones compare. Use an earlier checkpoint.")
    found = Examination(val_loss=loss, val_bits_per_byte=bits, tokens=tokens, bytes=n_bytes)
    return found if split != "val" else {**found, "zlib_bits_per_byte": prepared.zlib_bits_per_byte}


def _stores(prepared: Prepared, split: Split) -> list[TokenStore]:
    """All training parts come before all validation parts."""
    train = [part.train for part in prepared.parts.values()] if split != "val" else []
    return train + ([part.val for part in prepared.parts.values()] if split != "train" else [])
