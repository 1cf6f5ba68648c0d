"""What verdict.json says, key by key; docs/verdict.schema.json is made of these classes."""

from typing import Literal

from lm.ablation.config import Match
from lm.report.statistics import Verdict
from lm.schema import Config


class FoundDifference(Config):
    """A variant less the baseline. null where a run diverged, or too few have ended."""

    pairs: list[float | None]
    """One for each seed that both have, ascending; null where a run diverged."""
    mean: float | None
    interval: tuple[float, float] | None
    """Student's t at the level that Holm's procedure leaves this variant."""
    near: tuple[float, float] | None
    """For equivalence: misses in 10 % divided by the number of variants."""
    p: float | None
    """Two-sided, corrected by Holm; of a sign test where a run diverged. null of a variant that was given up."""
    permutation_p: float | None
    """Exact, over all signs, from 6 to 20 pairs."""
    bootstrap: tuple[float, float] | None
    """BCa at the level of the interval, from 10 pairs on."""
    verdict: Verdict
    more_seeds: int | None
    """How many would tell with 80 % power; null where it is told, or over 999 would be needed."""
    level: float
    """Of the interval."""
    pairing: float | None
    """Correlation of baseline and variant over seeds, from 3 pairs on."""
    apart: int | None
    """Seeds that would say as much if runs of the same seed had nothing in common; null where pairing leaves next to no spread."""
    given_up: bool
    """Whether the variant was given up after these pairs, and gets no more seeds."""


class FoundText(Config):
    """How far a difference may be one of this test text, with the runs as they are."""

    unit: Literal["documents", "rows"]
    """What is taken as drawn on its own: rows where there are few documents, or the objective does not tell them apart."""
    number: int
    half: float
    """Half of an interval around the mean, at the level of that over seeds: cluster-robust, of a ratio of sums."""


class FoundWorth(Config):
    """What a difference is worth, as a factor of the baseline's tokens: trained on so many it would have the variant's metric."""

    factor: float | None
    """null beyond the shortest and the longest baseline."""
    interval: tuple[float | None, float | None]
    """By Student's t of the pairs at every factor, at the level of the difference's interval; an end that is null lies beyond."""


class FoundLength(Config):
    """The baseline, trained on other many tokens."""

    tokens: int
    runs: dict[str, float | None]
    """The metric by seed, of the runs that have ended; null where one diverged."""


class FoundTuned(Config):
    """What tuning has chosen."""

    key: str
    metric: str
    """Figure of a run's summary that chose the value."""
    value: float
    at_edge: bool
    """Whether the best lies at the end of what was tried."""
    tried: dict[str, float | None]
    """Mean metric by value; null where a run diverged."""


class FoundTuning(Config):
    """How far tuning is."""

    ended: int
    runs: int


class FoundSize(Config):
    """What a run costs."""

    parameters: int
    non_embedding: int
    tokens: int
    flops: float
    """Of all its tokens, forward and backward."""


class FoundVariant(Config):
    """A variant, or the baseline."""

    overrides: list[str]
    """Those of its own."""
    runs: dict[str, float | None]
    """The metric by seed, of the runs that have ended; null where one diverged."""
    diverged: int
    mean: float | None
    """null where a run diverged, or none has ended."""
    tuned: FoundTuned | None
    tuning: FoundTuning | None
    """null where nothing is tuned, and once it is."""
    size: FoundSize
    knob: int | float | str | None
    """Value of the setting that was moved; null where none was."""
    step_s: float | None = None
    """Seconds of a step, as they were measured before the first run; null unless the time was matched."""
    difference: FoundDifference | None
    """null of the baseline."""
    text: FoundText | None = None
    """null where the metric is no loss of a test text, or the runs differ in what that consists of."""
    worth: FoundWorth | None = None
    """null unless the baseline ran at other lengths too, more tokens lower its metric, and two seeds or more have all runs."""
    failed: str | None = None
    """Why a run of it broke that has not ended since; null where none has."""


class Found(Config):
    """verdict.json: what a study asked and has found so far."""

    study: str
    hash: str
    """Of what was asked, but for how many seeds."""
    metric: str
    """Figure of a run's summary of which less is better."""
    units: dict[str, str]
    """Of the metric, of what tuning goes by, and of the curves."""
    baseline: str
    match: Match
    knob: str | None
    """The setting that was moved to match."""
    least_effect: float
    seeds: int
    """Asked for, of each variant."""
    give_up_after: int | None
    """Seeds after which a variant that is no better by then gets no more."""
    level: float
    exchange: dict[str, FoundLength] | None = None
    """The baseline by how many times its tokens it was trained on, 1 included; null where that was not asked for."""
    overrides: list[str]
    """Of every run."""
    plugins: dict[str, str]
    """SHA-256 of the code of those that the configs need, by name."""
    copies: list[str]
    """Files of these plugins, in the study's folder."""
    made_by: dict[str, list[str]]
    """Devices and versions of the runs that have ended: one of each where all were made alike."""
    variants: dict[str, FoundVariant]
    warnings: list[str]
