"""What a model's own answer is worth: named functions, never code from a config. One of one's own is a plugin (docs/finetuning.md)."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from lm.errors import ConfigError
from lm.schema import Slot

_MOST_CHARS = 60


@dataclass(frozen=True)
class Answer:
    """What a model has said to a prompt, beside what the data say. Texts have no special tokens in them."""

    prompt: str
    text: str
    reference: str
    n_tokens: int  # of the answer, with the one that ends it
    ended: bool  # by a token that ends answers, and not by max_tokens


class RewardConfig(Slot):
    """What an answer is worth. A kind of one's own has a `kind`, its options, and `score`."""

    weight: float = 1.0
    """Factor in the sum of all rewards."""

    @abstractmethod
    def score(self, answer: Answer) -> float:
        """Returns what the answer is worth; a finite number, which depends on nothing else, or no run can be resumed."""


def scores(rewards: Mapping[str, RewardConfig], answer: Answer) -> dict[str, float]:
    """Returns each reward by its name, without weights. ConfigError where one breaks or gives no finite number."""
    return {name: _score(name, reward, answer) for name, reward in rewards.items()}


def total(rewards: Mapping[str, RewardConfig], each: Mapping[str, float]) -> float:
    """Returns the weighted sum."""
    return sum(rewards[name].weight * score for name, score in each.items())


def _score(name: str, reward: RewardConfig, answer: Answer) -> float:
    shown = repr(answer.text[:_MOST_CHARS])
    try:
        score = float(reward.score(answer))
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
        raise ConfigError(f"objective.rewards.{name}: it broke on the answer {shown} ({said}). Mend it.") from error
    if not math.isfinite(score):
        raise ConfigError(f"objective.rewards.{name}: it gave {score} for the answer {shown}, and a finite number is needed. Mend it.")
    return score
