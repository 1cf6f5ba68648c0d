"""The batches of a run, for a custom training loop."""

from collections.abc import Iterator
from itertools import count

from lm.data.config import DataConfig
from lm.data.loader import Steps, eval_batches, micro_batches
from lm.data.order import spread
from lm.data.rows.base import ObjectiveConfig
from lm.data.rows.build import build_splits
from lm.data.store.cache import Log
from lm.data.store.prepare import prepare
from lm.data.tokenizer.config import TokenizerConfig
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.batch import Batch
from lm.nn.model_config import ModelConfig
from lm.printing import say


class Batches:
    """The same batches at the same steps as `lm train` would read with these configs, from data prepared and cached in the same way.

        data = Batches(cfg.data, cfg.objective, cfg.tokenizer, cfg.model)
        model = build_model(cfg.model.replace(vocab_size=data.tokenizer.vocab_size, max_seq_len=cfg.data.seq_len))
        for step, batches in data.steps():
            for batch in batches:
                loss = ...  # of a batch: the sum over its labels / batch.step_tokens

    model: tells whether batches are for an encoder-decoder or a single stack; None: for the first kind of model that the objective trains.
    Raises ConfigError where data, tokenizer and objective do not fit each other.
    """

    def __init__(
        self,
        data: DataConfig,
        objective: ObjectiveConfig,
        tokenizer: TokenizerConfig | Tokenizer,
        model: ModelConfig | None = None,
        seed: int = 0,
        log: Log = say,
    ) -> None:
        prepared = prepare(data, tokenizer, log=log, specials=objective.specials(), seed=seed)
        self.tokenizer: Tokenizer = prepared.tokenizer
        self.train, self.val, _, self.test = build_splits(objective, data, prepared, model, seed)
        self._data, self._seed = data, seed

    def steps(self, start: int = 0, micro_batch: int = 8) -> Iterator[tuple[int, list[Batch]]]:
        """Yields (step, its micro-batches) from `start` on, without end: data.global_batch rows, or the fewer of data.ramp, in batches of
        at most `micro_batch` rows.

        A step depends only on the seed and its number, so a loop that starts at step n continues one that ended before step n.
        """
        size, _ = micro_batches(self._data.global_batch, 1, micro_batch)
        rows = Steps(self.train, self._seed, self._data.sizes, size, rank=0, world=1, train_rows=self._data.train_rows, widest_first=False)
        return ((step, rows[step]) for step in count(start))

    def validation(self, micro_batch: int = 8) -> Iterator[Batch]:
        """Yields the batches of a validation: data.val_rows rows, always the same ones."""
        return eval_batches(self.val, spread(len(self.val), self._data.val_rows), micro_batch)
