"""How many rows a pass over the training data has."""

from lm.data.rows.base import Rows
from lm.data.rows.build import build_splits
from lm.data.store.prepare import prepare
from lm.printing import note
from lm.progress import progress
from lm.training.config import TrainConfig
from lm.training.weights.initial import given_tokenizer


def rows_of_epoch(cfg: TrainConfig, train: Rows) -> int:
    """Returns the rows that a run reads per epoch."""
    return min(len(train), cfg.data.train_rows or len(train))


def counted_rows(cfg: TrainConfig) -> int:
    """Returns the rows that a run reads per epoch. Prepares the run's data, silently but for what is made: the run itself will report."""
    with progress("Counting the rows"):
        given, specials, seed = given_tokenizer(cfg), cfg.objective.specials(), cfg.seeds.data
        data = prepare(cfg.data, given, log=lambda line: None, once=note, specials=specials, seed=seed)
        model = cfg.sized_model(data.tokenizer.vocab_size)
        return rows_of_epoch(cfg, build_splits(cfg.objective, cfg.data, data, model, seed).train)
