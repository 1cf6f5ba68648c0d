"""The rows of several sources as one: mixed by weight in training, concatenated in validation."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from lm.data.config import DataConfig, SourceConfig
from lm.data.mixture import Mixture, Share, merged
from lm.data.order import Ids
from lm.data.records.base import RecordConfig
from lm.data.rows.base import Rows
from lm.data.sizes import require_rising
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import Batch
from lm.schema import Config


class MixSource(Config):
    """One source of a mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """What it is called in phases, reports and metrics."""
    data: SourceConfig
    """Where its documents come from. Rows are the mixture's: seq_len and the like are set there."""
    weight: float | None = Field(None, ge=0)
    """Its share of the tokens, against the other weights; 0: only validated. null: its size ** (1 / temperature), if that is so for all."""
    max_epochs: float | None = Field(None, gt=0)
    """How often its rows may be read; after that the others share its part. null: without end."""


class Phase(Config):
    """Other weights for the first steps."""

    until_step: int = Field(gt=0)
    """The step up to which they hold, or a text such as 80%, after the phase before; behind the last the sources' own weights hold."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """Weight by name; a source that is not named has none."""


class MixConfig(DataConfig):
    """Several sources by weight. Each is validated on its own too, under its name."""

    kind: Literal["mix"] = "mix"
    sources: list[MixSource] = Field(min_length=1)
    """What is mixed; all of one kind of record, but for texts beside chats, for objective=sft."""
    phases: list[Phase] = []
    """Weights that change with the steps."""
    temperature: float = Field(1.0, gt=0)
    """Above 1, small sources without weights get more than their size (Conneau et al. 2019, arXiv:1911.02116)."""

    @property
    def records(self) -> RecordConfig | None:
        """The kind of those that are no plain texts."""
        return next((records for source in self.sources if (records := source.data.records) is not None), None)

    def parts(self) -> dict[str, SourceConfig]:
        return {source.name: source.data for source in self.sources}

    def phases_end(self) -> int:
        return max(super().phases_end(), *(phase.until_step for phase in self.phases), 0)

    def trained(self) -> set[str]:
        weighed = {source.name for source in self.sources if source.weight is None or source.weight > 0}
        return weighed | {name for phase in self.phases for name, weight in phase.weights.items() if weight > 0}

    def mixture(self, n_rows: Mapping[str, int], n_tokens: Mapping[str, int], seed: int, updates: int) -> Mixture:
        """Weights in the config count tokens; those of the returned mixture count rows, so they are divided by tokens per row. Its steps
        are draws of rows, from each of which so many updates are made."""
        size = {name: n ** (1 / self.temperature) for name, n in n_tokens.items()}
        own = {source.name: size[source.name] if source.weight is None else source.weight for source in self.sources}
        phases = [phase.weights for phase in self.phases] + [own]
        begins = [0, *(-(-phase.until_step // updates) for phase in self.phases)]
        if len({*begins}) < len(begins):
            raise ConfigError(f"data.phases: one has no step of its own, as {updates} in a row read the same rows. Let it end later.")
        per_row = {name: n_tokens[name] / n for name, n in n_rows.items()}
        places = [self.sizes.before(step) for step in begins]
        weights = {place: [phase.get(name, 0.0) / per_row[name] for name in n_rows] for place, phase in zip(places, phases, strict=True)}
        epochs = {source.name: source.max_epochs for source in self.sources}
        shares = [Share(n, None if (most := epochs[name]) is None else max(1, round(most * n))) for name, n in n_rows.items()]
        return Mixture(seed, shares, weights)

    @model_validator(mode="after")
    def _sources_agree(self) -> Self:
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources: the names {', '.join(names)} are not all different. Rename one.")
        if len(shapes := {source.data.shape for source in self.sources} - {"text"}) > 1:
            raise ValueError(f"sources: their records are of the kinds {', '.join(sorted(shapes))}. Mix sources of one kind.")
        if self.train_rows is not None:
            raise ValueError(f"train_rows={self.train_rows} is for a single source, and this is a mixture. Leave it out.")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError("sources: some have a weight and some have none. Give all or none of them one.")
        if self.temperature != 1 and self.sources[0].weight is not None:
            raise ValueError(f"temperature={self.temperature:g} is for sources without weights, and these have some. Leave one out.")
        if not any(source.weight is None or source.weight > 0 for source in self.sources):
            raise ValueError("sources: no weight is above 0, so there is nothing to train on. Raise one.")
        return self

    @model_validator(mode="after")
    def _shared_keys_are_the_mixtures(self) -> Self:
        for source in self.sources:
            for key, field in DataConfig.model_fields.items():
                if getattr(source.data, key) != field.default:
                    raise ValueError(f"sources: {source.name} sets {key}, which is one for all. Set data.{key} instead.")
        return self

    @model_validator(mode="after")
    def _phases_are_in_order(self) -> Self:
        require_rising("phases", [phase.until_step for phase in self.phases])
        names = {source.name for source in self.sources}
        for phase in self.phases:
            if unknown := phase.weights.keys() - names:
                raise ValueError(f"phases: {min(unknown)} is no source. Options: {', '.join(sorted(names))}.")
            if not sum(phase.weights.values()):
                raise ValueError(f"phases: no weight until step {phase.until_step} is above 0. Raise one.")
        return self


class MixedRows(Rows):
    """Row ids number the rows of all sources, source after source.  mixture: decides which rows a step reads; None in a validation.
    by_source: the rows of each source, if there are some that are looked at alone."""

    def __init__(
        self, parts: Mapping[str, Rows], pad: int, mixture: Mixture | None = None, by_source: Mapping[str, Rows] | None = None
    ) -> None:
        self._sources = dict(by_source or parts)
        self.names, self._parts, self._pad, self.mixture = list(parts), list(parts.values()), pad, mixture
        self.offsets = np.cumsum([0, *map(len, self._parts)])
        self.n_labels, self.updates = sum(part.n_labels for part in self._parts), self._parts[0].updates
        self.bytes_per_label = sum(part.bytes_per_label * part.n_labels for part in self._parts) / self.n_labels

    def label_bytes(self, tokenizer: Tokenizer) -> NDArray[np.int32] | None:
        return self._parts[0].label_bytes(tokenizer)

    def label_names(self) -> Sequence[str] | None:
        return self._parts[0].label_names()

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        source = np.searchsorted(self.offsets, ids, "right") - 1
        places = [np.flatnonzero(source == which) for which in np.unique(source)]
        if self._parts[0].uneven:
            places = [np.array([place]) for place in range(len(ids))]
        parts = [self._parts[which].batch(ids[at] - self.offsets[which], draw) for at in places for which in [source[at[0]]]]
        return merged(parts, places, self._pad)

    def documents(self, ids: Ids) -> Ids | None:
        """Documents are numbered across the n sources: document d of source i is d * n + i. The rows are as wide as in `batch`."""
        source, n = np.searchsorted(self.offsets, ids, "right") - 1, len(self._parts)
        parts = [(which, self._parts[which].documents(ids[source == which] - self.offsets[which])) for which in np.unique(source)]
        found = np.full((len(ids), max((of.shape[1] for _, of in parts if of is not None), default=0)), -1)
        for which, of in parts:
            if of is None:
                return None
            found[source == which, : of.shape[1]] = of * n + which
        return found

    def widths(self, ids: Ids) -> Sequence[Ids]:
        source = np.searchsorted(self.offsets, ids, "right") - 1
        found: list[Ids] = []
        for which in np.unique(source):
            of = self._parts[which].widths(ids[source == which] - self.offsets[which])
            found = found or [np.zeros_like(ids) for _ in of]
            for whole, part in zip(found, of, strict=True):
                whole[source == which] = part
        return found

    def widest(self, n: int) -> Ids:
        """Returns the widest rows of the source that has the widest row of all."""
        first = [part.batch(part.widest(1)) for part in self._parts]
        widths = [batch.tokens.numel() + (0 if batch.source_tokens is None else batch.source_tokens.numel()) for batch in first]
        which = int(np.argmax(widths))
        return np.asarray(self.offsets[which] + self._parts[which].widest(n))

    def sources(self) -> dict[str, Rows]:
        return self._sources

    def describe(self) -> str:
        return "\n".join(f"{name} {said}" for name, part in zip(self.names, self._parts, strict=True) if (said := part.describe()))

    def at(self, seed: int, places: range, first: int | None = None) -> Ids:
        """`seed` and `first` are not used here: the mixture has its own seed, and a limit for each source."""
        assert self.mixture is not None
        source, row = self.mixture.read(places.start, places.stop)
        return np.asarray(self.offsets[source] + row)

    def consumed(self, n: int, row_tokens: int) -> dict[str, float]:
        assert self.mixture is not None
        used = dict(zip(self.names, self.mixture.used(n).tolist(), strict=True))
        tokens = {f"tokens/{name}": count * row_tokens for name, count in used.items()}
        sizes = np.diff(self.offsets).tolist()
        return tokens | {f"epochs/{name}": round(used[name] / size, 4) for name, size in zip(self.names, sizes, strict=True)}
