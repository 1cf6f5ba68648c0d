"""The one place that knows which class makes the rows of an objective."""

from typing import NamedTuple

from lm.data.config import DataConfig, MixConfig
from lm.data.layout.mixed import MixedRows, build_mixture
from lm.data.layout.packing import BestFit
from lm.data.layout.windows import Packing, Windows
from lm.data.order import derived
from lm.data.rows.base import Rows
from lm.data.rows.causal import CausalRows
from lm.data.rows.config import (
    CausalConfig,
    DPOConfig,
    FIMConfig,
    MLMConfig,
    ObjectiveConfig,
    PrefixConfig,
    Seq2SeqConfig,
    SFTConfig,
    SpansConfig,
    UL2Config,
)
from lm.data.rows.denoising import DenoisingRows
from lm.data.rows.fim import FIMRows
from lm.data.rows.mlm import MLMRows
from lm.data.rows.preference import PreferenceRows
from lm.data.rows.prefix import PrefixRows
from lm.data.rows.seq2seq import Seq2SeqRows
from lm.data.rows.sft import SFTRows
from lm.data.store.prepare import Prepared
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.transformer import EncoderDecoderConfig, ModelConfig


class Splits(NamedTuple):
    """named: what is validated on its own beside `val`, by name."""

    train: Rows
    val: Rows
    named: dict[str, Rows]


def build_splits(cfg: ObjectiveConfig, data: DataConfig, prepared: Prepared, model: ModelConfig | None, seed: int) -> Splits:
    """The rows that a run trains on and is validated on; of a mixture also those of each source."""

    def rows(store: TokenStore, number: int) -> Rows:
        return build_rows(cfg, data, store, prepared.tokenizer, model, derived(seed, number) % 2**63 if number else seed)

    if not isinstance(data, MixConfig):
        return Splits(rows(prepared.train, 0), rows(prepared.val, 0), {})
    trained = {source.name for source in data.sources if source.weight is None or source.weight > 0}
    trained |= {name for phase in data.phases for name, weight in phase.weights.items() if weight > 0}
    parts = prepared.parts.items()
    train = {name: rows(part.train, number) for number, (name, part) in enumerate(parts) if name in trained}
    mixture = build_mixture(data, train, {name: part.train.n_tokens for name, part in parts}, seed)
    val = {name: rows(part.val, number) for number, (name, part) in enumerate(parts)}
    pad = prepared.tokenizer.pad
    return Splits(MixedRows(train, pad, mixture), MixedRows(val, pad), val)


def build_rows(
    cfg: ObjectiveConfig, data: DataConfig, store: TokenStore, tokenizer: Tokenizer, model: ModelConfig | None, seed: int = 0
) -> Rows:
    """The rows of one split; the model says whether there is a decoder beside an encoder, and what it starts with."""
    start = _start_token(cfg, model, tokenizer)
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
        case DPOConfig():
            return PreferenceRows(store, tokenizer, data.seq_len)


def _start_token(cfg: ObjectiveConfig, model: ModelConfig | None, tokenizer: Tokenizer) -> int | None:
    """What the decoder of an encoder-decoder model begins with; None for other models. No model: that of the first kind it trains."""
    if model is None:
        return tokenizer.start if cfg.models[0] == "encoder_decoder" else None
    if not isinstance(model, EncoderDecoderConfig):
        return None
    return tokenizer.start if model.start_token is None else model.start_token
