"""The config of a study: named variants of one baseline, how they are made comparable, and which difference is worth acting on."""

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lm.errors import ConfigError
from lm.schema import Config
from lm.spelling import did_you_mean

NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,59}"

Match = Literal["tokens", "params", "flops", "time"]
_STEPS = "trainer.max_steps"

TEST = "test_"
"""Prefix of the metrics of test text, which nothing else has read."""
_OWN = ("seed", "run")


class RunsConfig(Config):
    """Base of what asks for runs of several configs over seeds. Overrides are those of `lm train`."""

    overrides: list[str] = []
    """Overrides of every run, such as recipes=pretrain/nano_long."""
    tune: str | None = None
    """Setting tuned for every variant alike, such as optim.lr: five values a factor of 2 apart, a parabola through the best three. null:
    none."""
    tune_seeds: list[int] = Field([1000], min_length=1)
    """Seeds of the tuning runs; none of them reports."""
    seeds: int = Field(1, ge=1, le=1000)
    """Runs of each variant, with the seeds 0, 1, ...; more may be asked for later."""
    metric: str = "test_bits_per_byte"
    """A figure of the runs' summary of which less is better, such as test_ece, or test_loss/512 with eval.seq_len=[512]. Where it begins
    with test_, tuning reads val_loss for test_loss, and where labels are no text, of preferences val_pair_loss, of rated answers
    val_answer_loss, and val_bits_per_byte for all others."""
    threads: int = Field(1, ge=1, le=1024)
    """Threads of each run: another number gives other bits."""

    @field_validator("overrides")
    @classmethod
    def _leave_seeds_and_folders(cls, overrides: list[str]) -> list[str]:
        return refuse_own(overrides)

    @model_validator(mode="after")
    def _judged_by_others(self) -> Self:
        if clash := sorted(set(self.tune_seeds) & set(range(self.seeds))):
            raise ValueError(f"tune_seeds={clash} report as well, and what was chosen by a run must not be judged by it. Choose others.")
        return self

    @property
    def tests(self) -> bool:
        """Returns whether variants are judged on the test split, so that tuning needs another split."""
        return self.metric.startswith(TEST)

    @property
    def figure(self) -> str:
        """Returns the metric's name without its split and length."""
        return figure_of(self.metric)

    def tuning_metric(self, of_text: bool, learned: str) -> str:
        """Returns the metric by which a tuned setting is chosen: on validation text where variants are judged on test text.  of_text:
        labels are text, so that runs tell bits per byte.  learned: the figure that all of them lower in training."""
        if not self.tests:
            return self.metric
        if learned != "loss":
            return f"val_{learned}"
        return "val_bits_per_byte" if of_text and self.figure != "loss" else "val_loss"


class StudyConfig(RunsConfig):
    """The block `study` of a recipe, a file of its own, or the same on the command line."""

    variants: dict[str, list[str]]
    """Overrides by the name of each variant, the baseline included."""
    baseline: str
    """Name of the variant that the others are compared with; the first one unless it is given."""
    match: Match = "tokens"
    """What is equal in all variants beside the tokens: nothing, or the parameters; or instead of the tokens the FLOPs of the training, or
    its measured time."""
    knob: str | None = None
    """The one setting that makes it so, such as model.ffn.hidden. null: trainer.max_steps for flops and time, none
    for tokens."""
    seeds: int = Field(5, ge=2, le=1000)
    """Runs of each variant, with the seeds 0, 1, ...; more may be asked for later."""
    least_effect: float = Field(0.0, ge=0)
    """The smallest difference of the metric worth acting on."""
    give_up_after: int | None = Field(None, ge=2)
    """Seeds after which a variant that is no better by then gets no more. null: every variant gets all."""
    exchange: bool = False
    """Train the baseline at half and at twice its tokens too, each seed as a branch of its run, so that differences are told in tokens."""

    @field_validator("variants")
    @classmethod
    def _named(cls, variants: dict[str, list[str]]) -> dict[str, list[str]]:
        for name, overrides in variants.items():
            refuse_own(overrides)
            if not re.fullmatch(NAME, name):
                rule = "up to 60 letters (a to z, A to Z), digits and ._+- with a letter or digit first"
                raise ValueError(f"{name[:40]!r} cannot name a variant. Use {rule}.")
        if len(variants) < 2:
            raise ValueError(f"{len(variants)} variants were given, and a comparison takes two. Name another one.")
        return variants

    @model_validator(mode="before")
    @classmethod
    def _against_the_first(cls, tree: Any) -> Any:
        """Makes the first variant the baseline where none is named."""
        variants = tree.get("variants") if isinstance(tree, dict) else None
        if not variants or not isinstance(variants, dict) or tree.get("baseline") is not None:
            return tree
        return {**tree, "baseline": next(iter(variants))}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.baseline not in self.variants:
            raise ValueError(f"baseline={self.baseline} is none of the variants. {did_you_mean(self.baseline, self.variants)}")
        if self.match == "params" and self.knob is None:
            raise ValueError("match=params needs a setting to move. Name one, such as knob=model.ffn.hidden.")
        if self.match == "tokens" and self.knob is not None:
            raise ValueError(f"knob={self.knob} has nothing to match. Say match=params or match=flops, or leave it out.")
        if self.match == "time" and self.moved != _STEPS:
            raise ValueError(f"knob={self.knob} would have to be measured at every value. match=time moves {_STEPS}; leave the knob out.")
        if self.give_up_after is not None and self.give_up_after >= self.seeds:
            raise ValueError(f"give_up_after={self.give_up_after} leaves out none of {self.seeds} seeds. Give fewer, or leave it out.")
        return self

    @property
    def moved(self) -> str | None:
        """Returns the setting that is moved to match each variant with the baseline; None where nothing is matched."""
        return _STEPS if self.match in ("flops", "time") and self.knob is None else self.knob


def figure_of(metric: str) -> str:
    """Returns a metric's name without its split and length: loss of test_loss/512."""
    return metric.partition("/")[0].partition("_")[2]


def refuse_own(overrides: list[str]) -> list[str]:
    """Returns the overrides. Raises ConfigError where one sets a run's seeds or folder, which the study itself sets."""
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key.partition(".")[0] in _OWN:
            rule = "each run here has seeds and a folder of its own"
            raise ConfigError(f"{override[:60]}: {rule}. Leave it out; seeds= says how many, name= and dir= where all are.")
    return overrides
