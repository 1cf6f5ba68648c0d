"""What the rows of every objective offer, and the one place that knows which class makes them."""

from typing import Protocol

from lm.data.causal import CausalRows
from lm.data.config import DataConfig
from lm.data.denoising import DenoisingRows
from lm.data.fim import FIMRows
from lm.data.mlm import MLMRows
from lm.data.objective import (
    CausalConfig,
    FIMConfig,
    MLMConfig,
    ObjectiveConfig,
    PreferenceConfig,
    PrefixConfig,
    Seq2SeqConfig,
    SFTConfig,
    SpansConfig,
    UL2Config,
)
from lm.data.order import Ids
from lm.data.pack import BestFit
from lm.data.preference import PreferenceRows
from lm.data.prefix import PrefixRows
from lm.data.seq2seq import Seq2SeqRows
from lm.data.sft import SFTRows
from lm.data.shards import TokenStore
from lm.data.tokenizer import Tokenizer
from lm.data.windows import Packing, Windows
from lm.nn.batch import Batch
from lm.nn.transformer import AnyModelConfig, EncoderDecoderConfig


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
    cfg: ObjectiveConfig, data: DataConfig, store: TokenStore, tokenizer: Tokenizer, model: AnyModelConfig, seed: int = 0
) -> Rows:
    """The rows of one split; the model says whether there is a decoder beside an encoder, and what it starts with."""
    start = _start_token(model, tokenizer)
    how = data.packing or cfg.packings[0]

    def packing(ahead: int) -> Packing:
        return BestFit(store, data.seq_len, ahead) if how == "fit" else Windows(store, data.seq_len, data.mask_documents, ahead)

    match cfg:
        case CausalConfig():
            return CausalRows(store, tokenizer, data.seq_len, data.mask_documents, packing(ahead=1))
        case PrefixConfig():
            return PrefixRows(packing(ahead=1), tokenizer, seed)
        case FIMConfig():
            return FIMRows(cfg, packing(ahead=1), tokenizer, seed)
        case MLMConfig():
            return MLMRows(cfg, packing(ahead=0), tokenizer, seed)
        case SpansConfig() | UL2Config():
            return DenoisingRows(cfg, store, tokenizer, data.seq_len, start, seed)
        case Seq2SeqConfig():
            return Seq2SeqRows(cfg, store, tokenizer, data.seq_len, start)
        case SFTConfig():
            return SFTRows(cfg, store, tokenizer, data.seq_len, packed=how == "fit")
        case PreferenceConfig():
            return PreferenceRows(store, tokenizer, data.seq_len)


def _start_token(model: AnyModelConfig, tokenizer: Tokenizer) -> int | None:
    """What the decoder of an encoder-decoder model begins with; None for other models."""
    if not isinstance(model, EncoderDecoderConfig):
        return None
    return tokenizer.start if model.start_token is None else model.start_token
