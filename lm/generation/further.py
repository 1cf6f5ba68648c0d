"""Further figures of held-out text: the loss of rows of other lengths, and how sure a model is behind its own tokens."""

import operator
from collections.abc import Sequence
from functools import reduce

from lm.data.config import DataConfig
from lm.data.order import spread
from lm.data.rows.base import ObjectiveConfig
from lm.data.rows.build import split_rows
from lm.data.sources.base import Split
from lm.data.store.prepare import Prepared
from lm.generation.config import EvalConfig
from lm.generation.evaluate import Sharers, totals
from lm.generation.exposure import exposure, require_filled
from lm.losses.measure import Measure
from lm.nn.transformer import LM, ModelConfig
from lm.schema import Tree


def further(
    model: LM,
    wanted: EvalConfig,
    objective: ObjectiveConfig,
    data: DataConfig,
    prepared: Prepared,
    splits: Sequence[Split],
    micro_batch: int,
    measure: Measure,
    among: Sharers | None = None,
) -> Tree:
    """Returns the wanted figures, such as val_loss/512 and val_exposure, of as much text as data.val_rows rows hold; {} where none is
    wanted."""
    found: Tree = {}
    for seq_len in wanted.seq_len:
        longer, size = data.replace(seq_len=seq_len), max(1, micro_batch * data.seq_len // seq_len)
        n = None if data.val_rows is None else max(1, data.val_rows * data.seq_len // seq_len)
        each = split_rows(objective, longer, prepared, splits, model.cfg)
        parts = [totals(model, rows, spread(len(rows), n), prepared.tokenizer, size, among, measure, closely=True) for rows in each]
        figures = reduce(operator.add, parts).figures()
        found |= {f"{name}/{seq_len}": value for name, value in figures.items() if name.startswith("val_")}
    if wanted.own_tokens is not None:
        read = [(rows, spread(len(rows), data.val_rows)) for rows in split_rows(objective, data, prepared, splits, model.cfg)]
        found |= exposure(model, read, wanted.own_tokens, prepared.tokenizer, micro_batch)
    return found


def require_further(
    wanted: EvalConfig, objective: ObjectiveConfig, data: DataConfig, prepared: Prepared, splits: Sequence[Split], model: ModelConfig
) -> None:
    """Raises ConfigError where the text does not have the rows that `further` reads."""
    for seq_len in wanted.seq_len:
        split_rows(objective, data.replace(seq_len=seq_len), prepared, splits, model)
    if wanted.own_tokens is not None:
        read = [(rows, spread(len(rows), data.val_rows)) for rows in split_rows(objective, data, prepared, splits, model)]
        require_filled(read, micro_batch=8)
