"""Rewards that read the answer's text, or count its tokens."""

import re
from decimal import Decimal
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from lm.data.rewards.base import Answer, RewardConfig

_MINUS = "\N{MINUS SIGN}"
_NUMBER = re.compile(rf"(?:(?<![\w)])[-{_MINUS}])?\d[\d,]*(?:\.\d+)?")  # behind a letter or a digit it is a hyphen, or takes away


class ExactReward(RewardConfig):
    """1 where the answer is the reference, but for blank space around it and the chat template's empty thoughts; else 0."""

    compares = True

    kind: Literal["exact"] = "exact"

    def score(self, answer: Answer) -> float:
        return float(answer.text.removeprefix(answer.opening).strip() == answer.reference.strip())


class ArithmeticReward(RewardConfig):
    """1 where the last number of the answer is the last one of the reference; else 0."""

    compares = True

    kind: Literal["arithmetic"] = "arithmetic"

    def score(self, answer: Answer) -> float:
        found, wanted = last_number(answer.text), last_number(answer.reference)
        return float(found is not None and found == wanted)


class RegexReward(RewardConfig):
    """1 where the whole answer matches a pattern, as of a format; else 0."""

    kind: Literal["regex"] = "regex"
    pattern: str
    """In the syntax of Python's re; a dot matches the end of a line too."""

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no pattern ({error}). Write it in the syntax of Python's re.") from None
        return pattern

    def score(self, answer: Answer) -> float:
        return float(re.fullmatch(self.pattern, answer.text, re.DOTALL) is not None)


class EndedReward(RewardConfig):
    """1 where the model has ended the answer itself; 0 where max_tokens cut it."""

    kind: Literal["ended"] = "ended"

    def score(self, answer: Answer) -> float:
        return float(answer.ended)


class LengthReward(RewardConfig):
    """0 up to `free` tokens, then evenly down to -1 at `most` and beyond: a soft punishment of long answers (Yu et al. 2025,
    arXiv:2503.14476, equation 13)."""

    kind: Literal["length"] = "length"
    free: int = Field(ge=0)
    """Tokens that cost nothing."""
    most: int = Field(gt=0)
    """Tokens from which on the whole punishment is due."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.free >= self.most:
            raise ValueError(f"free={self.free} is not below most={self.most}. Lower it.")
        return self

    def score(self, answer: Answer) -> float:
        return -min(1.0, max(0.0, (answer.n_tokens - self.free) / (self.most - self.free)))


def last_number(text: str) -> Decimal | None:
    """Returns the last decimal number of a text, ignoring commas between digits; None where there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace(_MINUS, "-")) if found else None
