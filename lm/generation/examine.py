"""A model on data: what `lm eval` prints and `lm.evaluate` returns."""

import math
import operator
import os
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Literal, NotRequired, Self, cast

from lm import plugins
from lm.data.kinds import DataConfig, ObjectiveConfig
from lm.data.layout.mixed import MixedRows
from lm.data.order import spread
from lm.data.rows.base import Rows, usual
from lm.data.rows.build import build_rows
from lm.data.sources.base import SPLITS
from lm.data.store.prepare import Prepared, prepare
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import CheckpointError, ConfigError, NumericsError
from lm.generation.evaluate import Evaluation, totals
from lm.generation.load import load
from lm.nn.transformer import LM
from lm.schema import Config, from_tree
from lm.storage.model_folder import resolve_model
from lm.storage.run_folder import RunFolder

Split = Literal["val", "train", "test", "all"]


class Examination(Evaluation):
    """And what zlib at level 9 needs of the validation text, where that alone was read."""

    zlib_bits_per_byte: NotRequired[float]


class Examined(Config):
    """What a model is examined on, and which model objectives compare it with that have a parent."""

    data: DataConfig
    objective: ObjectiveConfig | None = None
    init_from: str | None = None

    @classmethod
    def of_run(cls, run: RunFolder) -> Self:
        """Raises CheckpointError where the run's config cannot be read, ConfigError where it needs a plugin."""
        tree = run.config()
        try:
            return from_tree(cls, {key: tree[key] for key in cls.model_fields if key in tree})
        except ConfigError as error:
            plugins.require(tree, run.config_file)
            raise CheckpointError(
                f"{run.config_file}: its data cannot be read ({error.sentence}). Restore the file, or give data=..."
            ) from None


def evaluate(
    model: str | Path | tuple[LM, Tokenizer],
    data: DataConfig | None = None,
    objective: ObjectiveConfig | None = None,
    *,
    parent: str | Path | None = None,
    split: Split = "val",
    micro_batch: int = 8,
    device: str = "auto",
    log: Callable[[str], None] = lambda line: None,
) -> Examination:
    """Loss (nats per predicted token) and bits per byte of a model on data.

    model: a run, model or checkpoint folder, or what `lm.load` returned. data: such as `lm.config(overrides=["data=wikitext103"]).data`,
    with rows of its `seq_len`; None: the data, the objective and the parent of the run that the folder belongs to. objective: None: what
    models of this kind are trained for on such data. parent: what DPO compares with; None: no pair loss is told. split: the part that
    training would validate on, the one that it would read, the one that is set aside for the test, or all.
    Raises ConfigError where data, objective and model do not fit, CheckpointError where the folder cannot be read, NumericsError for a loss
    that is not finite.
    """
    if data is None:
        run = RunFolder.around(resolve_model(str(model))) if not isinstance(model, tuple) else None
        if run is None:
            raise ConfigError("data: the model is in no run folder, so the data must be given. Pass data=lm.config(...).data.")
        of_run = Examined.of_run(run)
        data, objective, parent = of_run.data, objective or of_run.objective, parent or of_run.init_from
    if split == "test" and not data.test_frac:
        raise ConfigError("split=test: nothing is set aside for it. Raise data.test_frac.")
    lm, tokenizer = model if isinstance(model, tuple) else load(model, device)
    objective = objective or usual(lm.cfg.kind, data.shape)
    if objective.needs_parent and (parent is None or not Path(os.path.expanduser(parent)).exists()):
        log(f"init_from={parent}: there is no such model, and objective={objective.kind} compares with one; its loss is not told.")
        parent = None
    try:
        objective.require_fit(lm.cfg.kind, data)
    except ValueError as error:
        raise ConfigError(f"objective: {error}") from None
    if data.seq_len > lm.max_seq_len:
        _require_places(lm, data.seq_len)
        log(f"data.seq_len={data.seq_len} is over model.max_seq_len={lm.max_seq_len}: the rows are longer than any in training.")
    prepared = prepare(data, tokenizer, log=log)
    all_rows = _rows(prepared, split, lambda store: build_rows(objective, data, store, tokenizer, lm.cfg))
    where = str(lm.embed.weight.device)
    measure = objective.measure(None if parent is None else lambda: load(parent, where)[0])
    parts = [totals(lm, rows, spread(len(rows), data.val_rows), tokenizer, micro_batch, measure=measure) for rows in all_rows]
    found = cast(Examination, reduce(operator.add, parts).figures())
    if not math.isfinite(found["val_loss"]):
        said = f"the loss is {found['val_loss']} over {found['tokens']:,} tokens"
        raise NumericsError(f"eval: {said}, and only finite ones compare. Use an earlier checkpoint.")
    return found if split != "val" else {**found, "zlib_bits_per_byte": prepared.zlib_bits_per_byte}


def _rows(prepared: Prepared, split: Split, build: Callable[[TokenStore], Rows]) -> list[Rows]:
    """Of each part that is read, and of a mixture as a training validates it: its sources one behind the other."""
    wanted = [of for of in SPLITS if split in (of, "all") and prepared.n_tokens(of)]
    found = [{name: build(part.stores[of]) for name, part in prepared.parts.items() if part.stores[of].n_tokens} for of in wanted]
    return [rows[""] if "" in rows else MixedRows(rows, prepared.tokenizer.pad) for rows in found]


def _require_places(model: LM, seq_len: int) -> None:
    position = model.cfg.position
    if position.by_place:
        raise ConfigError(
            f"data.seq_len={seq_len} is over model.max_seq_len={model.max_seq_len}, and position={position.kind} has no more places."
            " Lower it, or leave it out."
        )
