"""Rewards of a model's own answers: named functions, never code from a config. A new kind is a plugin (docs/finetuning.md)."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Thread, get_ident
from time import monotonic
from typing import ClassVar, TypeVar

from lm.errors import ConfigError, place_in_plugin
from lm.printing import note
from lm.schema import Slot

_MOST_CHARS = 60
_MOST = 1e15
_SLOW_S = 60.0
_under_way: dict[int, tuple[float, str, "Answer"]] = {}  # by thread: since when, of what key, for which answer
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
        """Returns the answer's reward: a number of at most 1e15 that depends only on the answer, else a resumed run would differ."""


def scores(rewards: Mapping[str, RewardConfig], answers: Sequence[Answer], threads: int = 1) -> list[dict[str, float]]:
    """Returns the unweighted rewards of each answer by name.  threads: as of `in_threads`. Raises ConfigError where one fails or is not
    finite."""
    return in_threads(threads, lambda answer: {name: _score(name, reward, answer) for name, reward in rewards.items()}, answers)


def in_threads(threads: int, of: Callable[[Answer], T], answers: Sequence[Answer]) -> list[T]:
    """Returns what `of` gives for each answer, in their order.  threads: how many are asked at a time."""
    done = Event()
    Thread(target=_watch, args=(done,), daemon=True).start()
    try:
        if threads == 1:
            return [*map(of, answers)]
        with ThreadPoolExecutor(threads, "judging") as pool:
            return [*pool.map(of, answers)]
    finally:
        done.set()


def judged(what: str, of: Callable[[Answer], T], answer: Answer) -> T:
    """Returns what `of` gives for an answer. Raises ConfigError where it fails.  what: the key of what a user may have written."""
    _under_way[get_ident()] = monotonic(), what, answer
    try:
        return of(answer)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: it broke on the answer {shown(answer, error)}. Mend it.") from error
    finally:
        _under_way.pop(get_ident(), None)  # a reward may ask others, within


def _watch(done: Event) -> None:
    """Says what takes long, since nothing ends it, and a run that waits for it says nothing else."""
    while not done.wait(_SLOW_S):
        for began, what, answer in [*_under_way.values()]:
            if (taken := monotonic() - began) >= _SLOW_S:
                note(f"{what}: it has taken {taken:.0f} s so far for the answer {shown(answer)}")


def total(rewards: Mapping[str, RewardConfig], each: Mapping[str, float]) -> float:
    """Returns the weighted sum of an answer's rewards.  each: from `scores`."""
    return sum(rewards[name].weight * score for name, score in each.items())


def _score(name: str, reward: RewardConfig, answer: Answer) -> float:
    what = f"objective.rewards.{name}"
    score = judged(what, lambda answer: float(reward.score(answer)), answer)
    if not abs(score) <= _MOST:  # of larger ones the spread overflows
        raise ConfigError(f"{what}: it gave {score} for the answer {shown(answer)}, and a number of at most {_MOST:g} is needed. Mend it.")
    return score


def shown(answer: Answer, error: BaseException | None = None) -> str:
    """Returns the beginning of an answer, and what was raised at it and where, for a message."""
    text = repr(answer.text[:_MOST_CHARS])
    if error is None:
        return text
    said = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
    place = place_in_plugin(error)
    return f"{text} ({said}{f', at {place}' if place else ''})"
