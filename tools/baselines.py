"""What a loss is to be compared with, for the header of a recipe.

    python tools/baselines.py runs/pretrain-t5_tiny

Of the labels of the run's validation rows: the loss of unigram frequencies counted on the labels of 4,096 training rows (one added to
each), that of the model before its first step and after its last, and with the sources or prefixes exchanged among the rows, where there
are some.
Of preferences: the loss of the validation's pairs, which is ln 2 at the start, and the part of them whose better answer gained more.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.kinds import DPOConfig
from lm.data.order import Ids, spread
from lm.data.rows.base import Rows
from lm.data.rows.build import build_rows
from lm.data.store.prepare import prepare
from lm.errors import LmError
from lm.generation.evaluate import Evaluator
from lm.generation.load import load
from lm.losses.measure import Start
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM, EncoderDecoderConfig, build_model
from lm.schema import from_tree
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.options import folders, refuse

_ROWS, _TRAIN_ROWS = 64, 4096


class ExchangedSources(Rows):
    """Rows with the source of another row each, or with its tokens in the place of their prefix; none keeps its own."""

    def __init__(self, rows: Rows, seed: int = 0) -> None:
        self._rows, self.bytes_per_label = rows, rows.bytes_per_label
        circle = np.random.default_rng(seed).permutation(len(rows))
        self._other = np.empty_like(circle)
        self._other[circle] = np.roll(circle, 1)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """The targets of these rows."""
        lent = self._rows.batch(self._other[ids], draw)
        own = self._rows.batch(ids, draw)
        if own.prefix is not None:
            return replace(own, tokens=torch.where(own.prefix, lent.tokens, own.tokens))
        packed = own.documents is not None or lent.source_documents is not None
        return replace(
            own,
            documents=_documents(own.documents, own.positions) if packed else None,
            source_tokens=lent.source_tokens,
            source_positions=lent.source_positions,
            source_documents=_documents(lent.source_documents, lent.source_positions) if packed else None,
        )


def _documents(documents: Tensor | None, positions: Tensor | None) -> Tensor:
    """Those of the batch, or one a row. Each reads the lent source of its number, and none where the other row has fewer."""
    if documents is not None:
        return documents
    assert positions is not None
    return torch.where(positions < 0, -1, 0).int()


def label_counts(rows: Rows, ids: Ids, vocab_size: int) -> NDArray[np.int64]:
    """(v,) how often each token is a label of these rows."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(ids), _ROWS):
        labels = rows.batch(ids[start : start + _ROWS]).labels
        assert labels is not None
        counts += np.bincount(labels[labels != IGNORED].numpy(), minlength=vocab_size)
    return counts


def unigram_loss(train: NDArray[np.int64], val: NDArray[np.int64]) -> float:
    """Nats per label that is counted in `val`, under the frequencies of `train` with one added to each."""
    log_p = np.log((train + 1) / (train + 1).sum())
    return float(-(val * log_p).sum() / val.sum())


def baselines(run: Path) -> dict[str, float]:
    """Nats per label token, by what predicts them."""
    cfg = from_tree(TrainConfig, RunFolder(run).config())
    model, tokenizer = load(run)
    data = prepare(cfg.data, tokenizer, log=lambda line: None)
    rows, val = (build_rows(cfg.objective, cfg.data, store, tokenizer, model.cfg, cfg.seeds.data) for store in (data.train, data.val))
    ids = spread(len(val), cfg.data.val_rows)

    def loss(by: LM, of: Rows = val) -> float:
        return Evaluator(by, tokenizer, cfg.trainer.micro_batch).totals(of, ids).figures()["val_loss"]

    counts = [label_counts(part, which, tokenizer.vocab_size) for part, which in ((rows, spread(len(rows), _TRAIN_ROWS)), (val, ids))]
    fresh = cfg.init_from is None
    at_start = build_model(model.cfg, seed=cfg.seeds.init, device=model.embed.weight.device) if fresh else load(str(cfg.init_from))[0]
    found = {"unigram": unigram_loss(*counts), "at the start": loss(at_start), "at the end": loss(model)}
    if isinstance(cfg.objective, DPOConfig):
        measure = cfg.objective.measure(Start(lambda: at_start))
        of = Evaluator(model, tokenizer, cfg.trainer.micro_batch, measure=measure).totals(val, ids).figures()
        found |= {"loss of a pair": of["val_pair_loss"], "better answer gained more": of["val_accuracy"]}
    first = val.batch(ids[:1])
    if isinstance(model.cfg, EncoderDecoderConfig) or first.prefix is not None:
        found["with the sources of other rows"] = loss(model, ExchangedSources(val))
    return found


if __name__ == "__main__":
    try:
        for run in folders(sys.argv[1:], __doc__):
            for name, nats in baselines(run).items():
                print(f"{run}  {name:<32} {nats:.4f}")
    except LmError as error:
        refuse(error.sentence)
