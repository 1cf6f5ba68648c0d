"""What scaling.json says, key by key; docs/scaling.schema.json is made of these classes."""

from lm.ablation.scaling.config import Count
from lm.schema import Config


class FoundValue(Config):
    """low, high: 95 % of the resamples lie between them."""

    value: float
    low: float
    high: float


class FoundCell(Config):
    """A size for a number of tokens."""

    size: str
    times: float
    """Its tokens as a multiple of the config's own."""
    n: int
    """Parameters, as they are counted."""
    tokens: int
    flops: float
    """6 N D."""
    runs: dict[str, float | None]
    """The metric by seed, of the runs that have ended; null where one diverged."""
    law: float | None
    """What the law says; null where there is none."""
    tuned: float | None
    """Value of the tuned setting; null where nothing is tuned, and until it is."""
    at_edge: bool
    """Whether that lies at the end of what was tried."""


class FoundLaw(Config):
    """L = E + A / N^a + B / D^b."""

    E: FoundValue
    A: FoundValue
    B: FoundValue
    a: FoundValue
    b: FoundValue
    n_exponent: FoundValue
    """b / (a + b): N of the least loss grows as this power of FLOPs, D as the rest of 1."""
    misfit: float
    """Root mean square of log loss less log law, over runs."""


class FoundPoint(Config):
    """What the law says of an N and D, or of the best ones of some FLOPs."""

    flops: float
    """6 N D."""
    n: FoundValue
    tokens: FoundValue
    loss: FoundValue
    """Of the law; a run spreads around it."""


class FoundScaling(Config):
    """scaling.json: what a ladder asked and has found so far."""

    study: str
    hash: str
    """Of what was asked, but for how many seeds."""
    metric: str
    """Figure of a run's summary that the law is of."""
    unit: str
    """Of the metric."""
    count: Count
    """Which parameters N counts."""
    seeds: int
    """Asked for, of each cell."""
    level: float
    tune: str | None
    cells: dict[str, FoundCell]
    law: FoundLaw | None
    """null while too few runs have ended, or where nothing can be fitted; `warnings` says why."""
    resamples: int
    optima: list[FoundPoint]
    """By FLOPs: those of the largest run, and those that were asked for."""
    points: list[FoundPoint]
    """At the N and D that were asked for."""
    warnings: list[str]
