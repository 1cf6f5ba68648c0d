"""The rows of several sources as one: of a training by weight, of a validation one behind the other."""

from collections.abc import Mapping

import numpy as np

from lm.data.config import DataConfig, MixConfig
from lm.data.mixture import Mixture, Share, merged
from lm.data.order import Ids, step_rows
from lm.data.rows.base import Rows
from lm.nn.batch import Batch


class MixedRows:
    """Ids count through the sources in their order.  mixture: which are read when; None in a validation."""

    def __init__(self, parts: Mapping[str, Rows], pad: int, mixture: Mixture | None = None) -> None:
        self.names, self._parts, self._pad, self.mixture = list(parts), list(parts.values()), pad, mixture
        self.offsets = np.cumsum([0, *map(len, self._parts)])
        sizes = np.diff(self.offsets)
        self.bytes_per_label = float(np.average([part.bytes_per_label for part in self._parts], weights=sizes))

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """These rows in this order, whichever source each is of."""
        source = np.searchsorted(self.offsets, ids, "right") - 1
        places = [np.flatnonzero(source == which) for which in np.unique(source)]
        parts = [self._parts[which].batch(ids[source == which] - self.offsets[which], draw) for which in np.unique(source)]
        return merged(parts, places, self._pad)

    def widest(self, n: int) -> Ids:
        """Of the source whose widest row is the widest."""
        first = [part.batch(part.widest(1)) for part in self._parts]
        widths = [batch.tokens.numel() + (0 if batch.source_tokens is None else batch.source_tokens.numel()) for batch in first]
        which = int(np.argmax(widths))
        return np.asarray(self.offsets[which] + self._parts[which].widest(n))

    def describe(self) -> str:
        """What each has to say."""
        return "\n".join(f"{name} {said}" for name, part in zip(self.names, self._parts, strict=True) if (said := part.describe()))

    def step(self, step: int, global_batch: int) -> Ids:
        """The ids of a step."""
        assert self.mixture is not None
        source, row = self.mixture.read(step * global_batch, (step + 1) * global_batch)
        return np.asarray(self.offsets[source] + row)

    def consumed(self, rows: int) -> dict[str, dict[str, float]]:
        """Of each source, how many of the first `rows` rows of a run are its, and how many of its epochs that is."""
        assert self.mixture is not None
        used = self.mixture.used(rows).tolist()
        sizes = np.diff(self.offsets).tolist()
        return {name: {"rows": n, "epochs": round(n / size, 4)} for name, n, size in zip(self.names, used, sizes, strict=True)}


def step_ids(rows: Rows, seed: int, step: int, global_batch: int) -> Ids:
    """The row ids of a step, counted from 0."""
    if isinstance(rows, MixedRows):
        return rows.step(step, global_batch)
    return step_rows(seed, step, global_batch, len(rows))


def consumed(rows: Rows, steps: int, data: DataConfig) -> dict[str, float]:
    """Of each source of a mixture the tokens and epochs read in the first `steps` steps, as metrics; nothing of a single source."""
    if not isinstance(rows, MixedRows):
        return {}
    used = rows.consumed(steps * data.global_batch)
    tokens = {f"tokens/{name}": found["rows"] * data.seq_len for name, found in used.items()}
    return tokens | {f"epochs/{name}": found["epochs"] for name, found in used.items()}


def build_mixture(cfg: MixConfig, parts: Mapping[str, Rows], tokens: Mapping[str, int], seed: int) -> Mixture:
    """Weights are of tokens, so those of rows are divided by the tokens of a row.  tokens: of each source."""
    size = {name: n ** (1 / cfg.temperature) for name, n in tokens.items()}
    own = {source.name: size[source.name] if source.weight is None else source.weight for source in cfg.sources}
    phases = [phase.weights for phase in cfg.phases] + [own]
    begins = [0, *(phase.until_step for phase in cfg.phases)]
    per_row = {name: tokens[name] / len(rows) for name, rows in parts.items()}
    weights = {step: [phase.get(name, 0.0) / per_row[name] for name in parts] for step, phase in zip(begins, phases, strict=True)}
    epochs = {source.name: source.max_epochs for source in cfg.sources}
    shares = [Share(len(rows), None if (most := epochs[name]) is None else max(1, round(most * len(rows)))) for name, rows in parts.items()]
    return Mixture(seed, shares, weights, cfg.global_batch)
