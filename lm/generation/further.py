"""Further figures of held-out text: the loss of rows of other lengths, and how sure a model is behind its own tokens."""

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from lm.data.config import DataConfig
from lm.data.order import spread
from lm.data.rows.base import ObjectiveConfig, Rows
from lm.data.rows.build import split_rows
from lm.data.sources.base import Split
from lm.data.store.prepare import Prepared
from lm.errors import ConfigError
from lm.generation.config import EvalConfig
from lm.generation.evaluate import Evaluator, Totals
from lm.generation.exposure import exposure, require_filled
from lm.nn.model_config import ModelConfig
from lm.schema import Tree


def further(
    evaluator: Evaluator,
    wanted: EvalConfig,
    objective: ObjectiveConfig,
    data: DataConfig,
    prepared: Prepared,
    splits: Sequence[Split],
    seed: int,
) -> Tree:
    """Returns the wanted figures, such as val_loss/512 and val_exposure, of as much text as data.val_rows rows hold; {} where none is
    wanted.  seed: of what the objective draws of its rows."""
    found: Tree = {}
    model = evaluator.model.cfg
    for seq_len in wanted.seq_len:
        sized = replace(evaluator, micro_batch=max(1, evaluator.micro_batch * data.seq_len // seq_len))
        n = None if data.val_rows is None else max(1, data.val_rows * data.seq_len // seq_len)
        each = _rows_of(seq_len, objective, data, prepared, splits, model, seed)
        parts = [sized.totals(rows, spread(len(rows), n), closely=True) for rows in each]
        figures = reduce(operator.add, parts).figures()
        found |= {f"{name}/{seq_len}": value for name, value in figures.items() if name.startswith("val_")}
    if wanted.own_tokens is not None:
        read = [(rows, spread(len(rows), data.val_rows)) for rows in split_rows(objective, data, prepared, splits, model, seed)]
        found |= exposure(evaluator, read, wanted.own_tokens)
    return found


def _rows_of(
    seq_len: int, objective: ObjectiveConfig, data: DataConfig, prepared: Prepared, splits: Sequence[Split], model: ModelConfig, seed: int
) -> list[Rows]:
    """Returns rows of another length. Raises ConfigError where the text does not fill one, whose figures would be those of a shorter."""
    try:
        return split_rows(objective, data.replace(seq_len=seq_len), prepared, splits, model, seed)
    except ConfigError as error:
        raise ConfigError(error.sentence.replace("data.seq_len", "eval.seq_len")) from None


def by_source(evaluator: Evaluator, splits: Sequence[Rows], n: int | None) -> Tree:
    """Returns what a validation tells of each source of a mixture, such as val_loss/NAME; {} of other data.  n: rows to read of each."""
    named: dict[str, list[Totals]] = {}
    for rows in splits:
        for name, own in rows.sources().items():
            named.setdefault(name, []).append(evaluator.totals(own, spread(len(own), n)))
    figures = {name: reduce(operator.add, parts).figures() for name, parts in named.items()}
    return {f"{key}/{name}": value for name, each in figures.items() for key, value in each.items() if key.startswith("val_")}


def require_further(
    wanted: EvalConfig,
    objective: ObjectiveConfig,
    data: DataConfig,
    prepared: Prepared,
    splits: Sequence[Split],
    model: ModelConfig,
    seed: int,
) -> None:
    """Raises ConfigError where the text does not have the rows that `further` reads."""
    for seq_len in wanted.seq_len:
        _rows_of(seq_len, objective, data, prepared, splits, model, seed)
    if wanted.own_tokens is not None:
        read = [(rows, spread(len(rows), data.val_rows)) for rows in split_rows(objective, data, prepared, splits, model, seed)]
        require_filled(read, micro_batch=8)
