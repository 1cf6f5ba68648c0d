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
from lm.errors import ConfigError
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import EncoderDecoderConfig


class Splits(NamedTuple):
    """The rows of a run's splits.  named: rows by source that are also validated on their own.  test: rows that no validation reads; None:
    none are set aside."""

    train: Rows
    val: Rows
    named: dict[str, Rows]
    test: Rows | None

    def require(self, n: int) -> None:
        """Raises ConfigError where a training cannot read n rows, since all sources of a mixture reach their limits before."""
        if isinstance(self.train, MixedRows) and self.train.mixture is not None:
            self.train.mixture.require(n)


def build_splits(cfg: ObjectiveConfig, data: DataConfig, prepared: Prepared, model: ModelConfig | None, seed: int) -> Splits:
    """Returns the rows for training, validation and test; of a mixture also the validation rows of each source. What is only validated is
    in these alone."""
    parts, trained, pad = prepared.parts, data.trained(), prepared.tokenizer.pad
    seeds = _seeds(prepared, seed)

    def rows(store: TokenStore, name: str) -> Rows:
        try:
            return build_rows(cfg, data, store, prepared.tokenizer, model, seeds[name])
        except ConfigError as error:
            raise ConfigError(f"data.sources {name}: {error}" if name else str(error)) from None

    train = {name: rows(part.stores["train"], name) for name, part in parts.items() if name in trained}
    val = {name: rows(part.stores["val"], name) for name, part in parts.items()}
    test = {name: rows(store, name) for name, part in parts.items() if (store := part.stores["test"]).n_documents}
    tokens = {name: part.stores["train"].n_tokens for name, part in parts.items()}
    mixture = data.mixture({name: len(found) for name, found in train.items()}, tokens, seed, cfg.updates_of_rows())
    if mixture is None:
        return Splits(train[""], val[""], {}, test.get(""))
    tested = MixedRows(data.judged(test), pad) if test else None
    return Splits(MixedRows(train, pad, mixture), MixedRows(data.judged(val), pad), val, tested)


def _seeds(prepared: Prepared, seed: int) -> dict[str, int]:
    """Returns the seed of each source, by name."""
    return {name: derived(seed, number) % 2**63 if number else seed for number, name in enumerate(prepared.parts)}


def split_rows(
    cfg: ObjectiveConfig,
    data: DataConfig,
    prepared: Prepared,
    splits: Iterable[Split],
    model: ModelConfig | None,
    seed: int = 0,
    short: bool = False,
) -> list[Rows]:
    """Returns the rows of each of these splits that has tokens; those of a mixture's sources are concatenated, but for those that
    are only validated.

    seed: of the objective's random choices in the rows.  short: as in `Material`."""
    tokenizer, seeds = prepared.tokenizer, _seeds(prepared, seed)
    stores = [{name: store for name, part in prepared.parts.items() if (store := part.stores[split]).n_tokens} for split in splits]
    found = [
        {name: build_rows(cfg, data, store, tokenizer, model, seeds[name], short) for name, store in each.items()}
        for each in stores
        if each
    ]
    return [rows[""] if "" in rows else MixedRows(data.judged(rows), tokenizer.pad, by_source=rows) for rows in found]


def build_rows(
    cfg: ObjectiveConfig,
    data: DataConfig,
    store: TokenStore,
    tokenizer: Tokenizer,
    model: ModelConfig | None,
    seed: int = 0,
    short: bool = False,
) -> Rows:
    """Returns the rows of one split.  model: tells whether the rows are for an encoder-decoder, and its decoder's start token."""
    start = _start_token(cfg, model, tokenizer)
    found = cfg.rows(Material(store, tokenizer, data, data.packing or cfg.packings[0], start, model, seed, short))
    found.updates = cfg.updates_of_rows()
    return found


def _start_token(cfg: ObjectiveConfig, model: ModelConfig | None, tokenizer: Tokenizer) -> int | None:
    """Returns the start token of an encoder-decoder's decoder; None for other models. Without a model, the first kind of model that the
    objective trains decides."""
    if model is None:
        return tokenizer.start if cfg.models[0] == "encoder_decoder" else None
    if not isinstance(model, EncoderDecoderConfig):
        return None
    return tokenizer.start if model.start_token is None else model.start_token
