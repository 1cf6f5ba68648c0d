"""What the rows of every objective offer, and the one place that knows which class makes them."""

from typing import Protocol

from lm.data.causal import CausalRows
from lm.data.config import DataConfig
from lm.data.mlm import MLMRows
from lm.data.objective import CausalConfig, MLMConfig, ObjectiveConfig, Seq2SeqConfig
from lm.data.order import Ids
from lm.data.seq2seq import Seq2SeqRows
from lm.data.shards import TokenStore
from lm.data.tokenizer import Tokenizer
from lm.nn.batch import Batch


class Rows(Protocol):
    """Rows by id. What is random in them is a function of (seed, draw, row id, column): draw is the step, and 0 in a validation."""

    bytes_per_label: float  # of text, on average in this split: for tokenizers whose tokens are not bytes

    def __len__(self) -> int:
        """How many."""

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """These rows in this order."""

    def describe(self) -> str:
        """One line on what was cut or left empty; '' where there is nothing to say."""


def build_rows(
    cfg: ObjectiveConfig, data: DataConfig, store: TokenStore, tokenizer: Tokenizer, start_token: int | None = None, seed: int = 0
) -> Rows:
    """start_token: what the decoder of an encoder-decoder begins with. None: the tokenizer's."""
    match cfg:
        case CausalConfig():
            return CausalRows(store, tokenizer, data.seq_len, data.mask_documents)
        case MLMConfig():
            return MLMRows(cfg, store, tokenizer, data.seq_len, data.mask_documents, seed)
        case Seq2SeqConfig():
            return Seq2SeqRows(cfg, store, tokenizer, data.seq_len, tokenizer.start if start_token is None else start_token)
