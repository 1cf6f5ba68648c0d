"""Rows of preference pairs for a reward model, which reads a whole text and tells a number at its last token."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from lm.data.layout.examples import places_of, side_by_side
from lm.data.order import Ids
from lm.data.rows.base import Material, ObjectiveConfig, Rows
from lm.data.rows.preference import PreferenceRows
from lm.data.rows.seq2seq import rounded
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.losses.measure import Measure, Rewards, Start
from lm.nn.batch import IGNORED, Batch
from lm.nn.model_config import ModelConfig

REWARD = "reward"  # the name of what the model tells


class RewardModelConfig(ObjectiveConfig):
    """Tell a number at the end of a prompt and its answer, more of the better one of two answers: a reward model (Ouyang et al. 2022,
    arXiv:2203.02155, section 3.5)."""

    shapes = ("preference",)
    packings = ("none",)
    needs_masked_documents = True
    trains_mtp = False

    kind: Literal["reward"] = "reward"
    centre: float = Field(0.0, ge=0)
    """Factor on (r_better + r_other)^2, which keeps rewards around 0 (Eisenstein et al. 2023, arXiv:2312.09244, equation 3: 0.01)."""

    @property
    def texts(self) -> int:
        return 2

    def headed(self, model: ModelConfig) -> ModelConfig:
        """The model as it is where it tells one number already, whatever that is called: LABEL_0 in transformers."""
        return model if model.head.tells_number() else model.replace(head=model.head.telling([REWARD], bias=False))

    def measure(self, start: Start | None) -> Measure:
        return Rewards()

    def rows(self, of: Material) -> Rows:
        return RewardRows(of.store, of.tokenizer, of.data.seq_len)


class RewardRows(PreferenceRows):
    """Row i is pair i, which gives two rows of a batch, the chosen answer first, with a label at the last token of each.

    A pair with an answer that does not end within data.seq_len is dropped and counted.
    """

    ahead = 0

    def __init__(self, store: TokenStore, tokenizer: Tokenizer, seq_len: int) -> None:
        super().__init__(store, tokenizer, seq_len)
        self.n_labels, self.bytes_per_label = len(self), 0.0

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """`step_tokens` counts pairs, not labels."""
        batch = judged_batch([example.tokens for pair in self._kept[ids] for example in self._examples(int(pair))], self.pad)
        batch.step_tokens = len(ids)
        return batch

    def label_bytes(self, tokenizer: Tokenizer) -> None:
        """Of pairs, which are what is told apart, and no text."""

    def label_names(self) -> Sequence[str]:
        return [REWARD]


def judged_batch(texts: Sequence[Ids], pad: int) -> Batch:
    """Returns a batch with a text in each row, and a label at its last token."""
    rows, width = [[text] for text in texts], rounded(max(map(len, texts)))
    labels = [[np.where(np.arange(len(text)) == len(text) - 1, 0, IGNORED)] for text in texts]
    return Batch(side_by_side(rows, width, pad), side_by_side(labels, width, IGNORED), *places_of(rows, width))
