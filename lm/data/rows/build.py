"""From token stores to the rows of a run's splits."""

from collections.abc import Iterable
from typing import NamedTuple

from lm.data.config import DataConfig
from lm.data.layout.mixed import MixedRows
from lm.data.order import derived
from lm.data.rows.base import Material, ObjectiveConfig, Rows
from lm.data.sources.base import Split
from lm.data.store.prepare import Prepared
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.transformer import EncoderDecoderConfig, ModelConfig


class Splits(NamedTuple):
    """named: what is validated on its own beside `val`, by name.  test: what no validation reads; None: nothing is set aside."""

    train: Rows
    val: Rows
    named: dict[str, Rows]
    test: Rows | None


def build_splits(cfg: ObjectiveConfig, data: DataConfig, prepared: Prepared, model: ModelConfig | None, seed: int) -> Splits:
    """The rows that a run trains on, is validated and tested on; of a mixture also those of each source."""
    parts, trained, pad = prepared.parts, data.trained(), prepared.tokenizer.pad
    seeds = _seeds(prepared, seed)

    def rows(store: TokenStore, name: str) -> Rows:
        return build_rows(cfg, data, store, prepared.tokenizer, model, seeds[name])

    train = {name: rows(part.stores["train"], name) for name, part in parts.items() if name in trained}
    val = {name: rows(part.stores["val"], name) for name, part in parts.items()}
    test = {name: rows(store, name) for name, part in parts.items() if (store := part.stores["test"]).n_documents}
    tokens = {name: part.stores["train"].n_tokens for name, part in parts.items()}
    mixture = data.mixture({name: len(found) for name, found in train.items()}, tokens, seed)
    if mixture is None:
        return Splits(train[""], val[""], {}, test.get(""))
    return Splits(MixedRows(train, pad, mixture), MixedRows(val, pad), val, MixedRows(test, pad) if test else None)


def _seeds(prepared: Prepared, seed: int) -> dict[str, int]:
    """Of each source."""
    return {name: derived(seed, number) % 2**63 if number else seed for number, name in enumerate(prepared.parts)}


def split_rows(
    cfg: ObjectiveConfig, data: DataConfig, prepared: Prepared, splits: Iterable[Split], model: ModelConfig | None, seed: int = 0
) -> list[Rows]:
    """The rows of each of these splits that has any, and of a mixture its sources one behind the other, as a validation reads them.

    seed: of what an objective draws of them."""
    tokenizer, seeds = prepared.tokenizer, _seeds(prepared, seed)
    stores = [{name: store for name, part in prepared.parts.items() if (store := part.stores[split]).n_tokens} for split in splits]
    found = [{name: build_rows(cfg, data, store, tokenizer, model, seeds[name]) for name, store in each.items()} for each in stores if each]
    return [rows[""] if "" in rows else MixedRows(rows, tokenizer.pad) for rows in found]


def build_rows(
    cfg: ObjectiveConfig, data: DataConfig, store: TokenStore, tokenizer: Tokenizer, model: ModelConfig | None, seed: int = 0
) -> Rows:
    """The rows of one split; the model says whether there is a decoder beside an encoder, and what it starts with."""
    start = _start_token(cfg, model, tokenizer)
    return cfg.rows(Material(store, tokenizer, data, data.packing or cfg.packings[0], start, seed))


def _start_token(cfg: ObjectiveConfig, model: ModelConfig | None, tokenizer: Tokenizer) -> int | None:
    """What the decoder of an encoder-decoder model begins with; None for other models. No model: that of the first kind it trains."""
    if model is None:
        return tokenizer.start if cfg.models[0] == "encoder_decoder" else None
    if not isinstance(model, EncoderDecoderConfig):
        return None
    return tokenizer.start if model.start_token is None else model.start_token
