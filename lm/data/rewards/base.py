"""Rewards of a model's own answers: named functions, never code from a config. A new kind is a plugin (docs/finetuning.md)."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from lm.errors import ConfigError, place_in_plugin
from lm.schema import Slot

_MOST_CHARS = 60
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """A model's answer to a prompt, with the data's reference answer. The texts contain no special tokens."""

    prompt: str
    text: str
    reference: str
    n_tokens: int  # of the answer, including its end token
    ended: bool  # by an end token, not by max_tokens
    learned: float | None = None  # what objective.reward_model says of its tokens
    earlier: tuple[tuple[str, str], ...] = ()  # answers before this one, each with what objective.environment replied
    opening: str = ""  # what the chat template writes before an answer without thoughts, as Qwen3's empty ones; not in the reference


class RewardConfig(Slot):
    """What an answer is worth. A kind of one's own has a `kind`, its options, and `score`."""

    compares: ClassVar[bool] = False
    """Whether the score depends on the reference."""

    weight: float = 1.0
    """Factor in the sum of all rewards."""

    @abstractmethod
    def score(self, answer: Answer) -> float:
        """Returns the answer's reward: a finite number that depends only on the answer, else a resumed run would differ."""


def scores(rewards: Mapping[str, RewardConfig], answers: Sequence[Answer], threads: int = 1) -> list[dict[str, float]]:
    """Returns the unweighted rewards of each answer by name.  threads: as of `in_threads`. Raises ConfigError where one fails or is not
    finite."""
    return in_threads(threads, lambda answer: {name: _score(name, reward, answer) for name, reward in rewards.items()}, answers)


def in_threads(threads: int, of: Callable[[Answer], T], answers: Sequence[Answer]) -> list[T]:
    """Returns what `of` gives for each answer, in their order.  threads: how many are asked at a time."""
    if threads == 1:
        return [*map(of, answers)]
    with ThreadPoolExecutor(threads, "judging") as pool:
        return [*pool.map(of, answers)]


def total(rewards: Mapping[str, RewardConfig], each: Mapping[str, float]) -> float:
    """Returns the weighted sum of an answer's rewards.  each: from `scores`."""
    return sum(rewards[name].weight * score for name, score in each.items())


def _score(name: str, reward: RewardConfig, answer: Answer) -> float:
    try:
        score = float(reward.score(answer))
    except (Exception, SystemExit) as error:
        raise ConfigError(f"objective.rewards.{name}: it broke on the answer {shown(answer, error)}. Mend it.") from error
    if not math.isfinite(score):
        gave = f"it gave {score} for the answer {shown(answer)}, and a finite number is needed"
        raise ConfigError(f"objective.rewards.{name}: {gave}. Mend it.")
    return score


def shown(answer: Answer, error: BaseException | None = None) -> str:
    """Returns the beginning of an answer, and what was raised at it and where, for a message."""
    text = repr(answer.text[:_MOST_CHARS])
    if error is None:
        return text
    said = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
    place = place_in_plugin(error)
    return f"{text} ({said}{f', at {place}' if place else ''})"
