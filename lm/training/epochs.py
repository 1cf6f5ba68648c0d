"""How many rows a pass over the training data has."""

from lm.data.rows.base import Rows
from lm.data.rows.build import build_splits
from lm.data.store.prepare import prepare
from lm.progress import progress
from lm.training.config import TrainConfig
from lm.training.weights.initial import given_tokenizer


def rows_of_epoch(cfg: TrainConfig, train: Rows) -> int:
    """Returns the rows that a run reads per epoch."""
    return min(len(train), cfg.data.train_rows or len(train))


def counted_rows(cfg: TrainConfig) -> tuple[int, list[str]]:
    """Returns the rows that a run reads per epoch, for which its data are prepared, and the lines on those that the run will not tell
    again."""
    with progress("Counting the rows"):
        first: list[str] = []
        prepare(cfg.data, given_tokenizer(cfg), log=first.append, specials=cfg.objective.specials(), seed=cfg.seeds.data)
        again: list[str] = []
        data = prepare(cfg.data, given_tokenizer(cfg), log=again.append, specials=cfg.objective.specials(), seed=cfg.seeds.data)
        train = build_splits(cfg.objective, cfg.data, data, cfg.sized_model(data.tokenizer.vocab_size), cfg.seeds.data).train
    return rows_of_epoch(cfg, train), [line for line in first if line not in again]
