"""Rows of answers that are rated as good or bad, each a prompt with its answer."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from lm.data.layout.examples import Example
from lm.data.order import Ids, permuted
from lm.data.records.base import LEARNED, OTHER
from lm.data.rows.base import Material, ObjectiveConfig, Rows
from lm.data.rows.parted import PartedRows
from lm.data.rows.seq2seq import one_per_row
from lm.losses.kto import KTOLoss
from lm.losses.measure import Measure, Rated, Start
from lm.nn.batch import IGNORED, Batch


class KTOConfig(ObjectiveConfig):
    """Raise answers that are rated good and lower bad ones, compared with the model at the start (KTO). It needs init_from.

    Ethayarajh et al. 2024, arXiv:2402.01306, with the reference point of equation 8 over all rows of a step. Preferences are two answers.
    """

    shapes = ("rated", "preference")
    usual_for = ("rated",)
    packings = ("none",)
    needs_masked_documents = True
    needs_parent = True
    trains_mtp = False

    kind: Literal["kto"] = "kto"
    beta: float = Field(0.1, gt=0)
    """How fast the value of a gain levels off (equation 8)."""
    good_weight: float = Field(1.0, gt=0)
    """Of good answers; where they are few, more (section 4.2: so that good and bad ones count about alike)."""
    bad_weight: float = Field(1.0, gt=0)
    """Of bad answers."""

    def loss(self) -> KTOLoss:
        return KTOLoss(self.beta, self.good_weight, self.bad_weight)

    def measure(self, start: Start | None) -> Measure:
        return Rated(self.loss(), start)

    def rows(self, of: Material) -> Rows:
        return RatedRows(of)


class RatedRows(PartedRows):
    """Row i is answer i. `answers` of a batch are the labels of good ones; beside it stands the batch of the same prompts with answers to
    others. Whose these are is a function of the seed: each answer is one other prompt's.

    An answer that does not end within data.seq_len is dropped and counted.
    """

    def __init__(self, of: Material) -> None:
        super().__init__(of.store, of.tokenizer, of.data.seq_len)
        at, kinds = of.store.parts.T
        first = np.isin(at, of.store.starts) | (np.diff(kinds >= OTHER, prepend=False))
        ends = np.append(at[first][1:], of.store.n_tokens)
        answer = np.full(len(ends), -1)  # where it begins
        learned = kinds % OTHER == LEARNED
        answer[(np.cumsum(first) - 1)[learned]] = at[learned]
        fits = (answer > at[first]) & (ends - at[first] - 1 <= self._seq_len)
        self._require_most(int(fits.sum()), "answers", "do not fit into", "shorten the texts", len(fits))
        self._dropped = int((~fits).sum())
        self._bounds, self._good = np.stack([at[first], answer, ends], 1)[fits], (kinds < OTHER)[first][fits]
        order = permuted(np.arange(len(self)), len(self), of.seed)
        self._other = np.empty_like(order)
        self._other[order] = np.roll(order, -1)

    def __len__(self) -> int:
        return len(self._bounds)

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """`step_tokens` counts answers, not labels."""
        own = [self._example(start, end) for start, _, end in self._bounds[ids].tolist()]
        batch = one_per_row(own, self.pad)
        assert batch.labels is not None
        bad = np.flatnonzero(~self._good[ids])
        batch.answers = batch.labels.clone()
        batch.answers[bad] = IGNORED
        batch.step_tokens, batch.beside = len(ids), [one_per_row([self._mixed(i) for i in ids.tolist()], self.pad)]
        return batch

    def widths(self, ids: Ids) -> Sequence[Ids]:
        (start, answer, end), (_, begin, other) = self._bounds[ids].T, self._bounds[self._other[ids]].T
        return [np.maximum(end - start, np.minimum(answer - start + other - begin, self._seq_len + 1))]

    def describe(self) -> str:
        few = f"{self._store.split}: {int(self._good.sum()):,} good answers and {int((~self._good).sum()):,} bad ones"
        return few + (f"; dropped as too long: {self._dropped:,}" if self._dropped else "")

    def remark(self, row: int) -> str:
        return f"{'good' if self._good[row] else 'bad'} answer"

    def _mixed(self, i: int) -> Example:
        """Returns prompt i with the answer to another; what does not fit into a row is left out."""
        start, middle, _ = self._bounds[i].tolist()
        _, begin, end = self._bounds[self._other[i]].tolist()
        given, learned = self._example(start, middle), self._example(begin, end)
        both = [np.concatenate(each)[: self._seq_len + 1] for each in zip(given, learned, strict=True)]
        return Example(*both)
