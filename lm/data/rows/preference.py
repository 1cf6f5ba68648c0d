"""Rows of preference pairs: a prompt with the chosen answer, and the same prompt with the rejected one."""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from lm.data.layout.examples import Example
from lm.data.order import Ids
from lm.data.records.base import OTHER
from lm.data.rows.base import Material, ObjectiveConfig, Rows
from lm.data.rows.parted import PartedRows
from lm.data.rows.seq2seq import one_per_row
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.losses.measure import Measure, Pairs, Start
from lm.losses.pairs import APOLoss, DPOLoss, IPOLoss, ORPOLoss, PairLoss, SimPOLoss
from lm.nn.batch import Batch


class PreferenceConfig(ObjectiveConfig):
    """What objectives over pairs of answers share."""

    shapes = ("preference",)
    packings = ("none",)
    needs_masked_documents = True
    trains_mtp = False

    @property
    def texts(self) -> int:
        return 2

    @abstractmethod
    def loss(self) -> PairLoss:
        """Returns the loss function for a batch of pairs."""

    def measure(self, start: Start | None) -> Measure:
        return Pairs(self.loss(), start)

    def rows(self, of: Material) -> Rows:
        return PreferenceRows(of.store, of.tokenizer, of.data.seq_len)


class DPOConfig(PreferenceConfig):
    """Raise the better of two answers above the worse one, compared with the model at the start (DPO). It needs init_from."""

    usual_for = ("preference",)
    needs_parent = True

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """How much a departure from the model at the start costs (Rafailov et al. 2023, arXiv:2305.18290, equation 7)."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Part of the pairs that are taken to be the wrong way round (conservative DPO; Mitchell 2023)."""
    sft_weight: float = Field(0.0, ge=0)
    """Of the better answer's nats per token beside (Pang et al. 2024, arXiv:2404.19733: 1; Llama 3: 0.2)."""

    def loss(self) -> PairLoss:
        return DPOLoss(self.beta, self.label_smoothing, self.sft_weight)


class IPOConfig(PreferenceConfig):
    """Raise the better of two answers above the worse one by so much, and no more, compared with the model at the start (IPO). It needs
    init_from."""

    needs_parent = True

    kind: Literal["ipo"] = "ipo"
    beta: float = Field(0.1, gt=0)
    """The better one is to gain 1 / (2 beta) nats per token on the other (Azar et al. 2023, arXiv:2310.12036, equation 17)."""

    def loss(self) -> PairLoss:
        return IPOLoss(self.beta)


class APOConfig(PreferenceConfig):
    """Raise the better of two answers and lower the worse one, each by itself, compared with the model at the start (APO). It needs
    init_from."""

    needs_parent = True

    kind: Literal["apo"] = "apo"
    beta: float = Field(0.1, gt=0)
    """How soon a departure from the model at the start is enough."""
    down: bool = False
    """Lower both, and the worse one more: for better answers that are worse than the model's own (APO-down; D'Oosterlinck et al. 2024,
    arXiv:2408.06266). false: APO-zero."""

    def loss(self) -> PairLoss:
        return APOLoss(self.beta, self.down)


class SimPOConfig(PreferenceConfig):
    """Raise the better of two answers above the worse one, by the mean of log p of their tokens (SimPO)."""

    kind: Literal["simpo"] = "simpo"
    beta: float = Field(2.0, gt=0)
    """Factor on that mean (Meng et al. 2024, arXiv:2405.14734, equation 4)."""
    margin: float = Field(1.0, ge=0)
    """How much more the better one should be worth (equation 6)."""

    def loss(self) -> PairLoss:
        return SimPOLoss(self.beta, self.margin)


class ORPOConfig(PreferenceConfig):
    """Learn the better of two answers, and raise its odds above those of the worse one (ORPO)."""

    kind: Literal["orpo"] = "orpo"
    weight: float = Field(0.1, gt=0)
    """Of the odds beside the likelihood (Hong et al. 2024, arXiv:2403.07691, equation 6)."""

    def loss(self) -> PairLoss:
        return ORPOLoss(self.weight)


class PreferenceRows(PartedRows):
    """Row i is pair i, which gives two rows of a batch, the chosen answer first.

    A pair with an answer that does not end within data.seq_len is dropped and counted.
    """

    ahead: ClassVar[int] = 1
    """How many of a text's last tokens are only labels, and take no place."""

    def __init__(self, store: TokenStore, tokenizer: Tokenizer, seq_len: int) -> None:
        super().__init__(store, tokenizer, seq_len)
        parts = store.parts
        other = np.flatnonzero((parts[:, 1] >= OTHER) & np.append(True, parts[:-1, 1] < OTHER))
        self._middle = parts[other, 0]  # where the rejected answer's side (with the prompt) begins
        self._ends = np.append(store.starts[1:], store.n_tokens)
        self._longest = np.maximum(self._middle - store.starts, self._ends - self._middle)
        self._kept = np.flatnonzero(self._longest - self.ahead <= seq_len)
        self._require_most(len(self._kept), "pairs", "do not fit into", "shorten the texts")

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """`step_tokens` counts pairs, not labels."""
        batch = one_per_row([example for pair in self._kept[ids] for example in self._examples(int(pair))], self.pad)
        batch.step_tokens = len(ids)
        return batch

    def widths(self, ids: Ids) -> Sequence[Ids]:
        return [self._longest[self._kept[ids]]]

    def describe(self) -> str:
        return self._too_long("pair")

    def _examples(self, pair: int) -> list[Example]:
        bounds = [int(self._store.starts[pair]), int(self._middle[pair]), int(self._ends[pair])]
        return [self._example(*side) for side in pairwise(bounds)]
