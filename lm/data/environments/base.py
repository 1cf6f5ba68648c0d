"""What replies to a model's answers, which then answers again: tools, tests, games. A new kind is a plugin (docs/finetuning.md)."""

import re
from abc import abstractmethod
from typing import ClassVar

from pydantic import Field

from lm.data.rewards.base import Answer, judged, shown
from lm.errors import ConfigError
from lm.schema import Slot

_LONE = re.compile("[\ud800-\udfff]")  # halves of surrogate pairs, which no text has


class EnvironmentConfig(Slot):
    """Replies to answers of a model. A kind of one's own has a `kind`, its options, and `reply`."""

    role: ClassVar[str] = "user"
    """Who replies, as the chat template calls it: user or tool."""

    answers: int = Field(4, gt=1, le=64)
    """Most answers to a prompt."""
    room: int = Field(256, gt=0)
    """Most tokens behind a prompt, of all answers and replies; where a reply and another answer might not fit, the last one stands."""

    def compares(self) -> bool:
        """Returns whether replies depend on the reference."""
        return False

    @abstractmethod
    def reply(self, answer: Answer) -> str | None:
        """Returns the reply to the last answer; None where that one stands. It depends only on `answer`, which tells the earlier ones, else
        a resumed run would differ."""


def reply_of(environment: EnvironmentConfig, answer: Answer) -> str | None:
    """Returns the reply to an answer. Raises ConfigError where the environment fails."""
    said: object = judged("objective.environment", environment.reply, answer)
    if said is not None and not isinstance(said, str):
        kind = type(said).__name__
        raise ConfigError(f"objective.environment: its reply to the answer {shown(answer)} is of type {kind}. Return text, or None.")
    if said is not None and _LONE.search(said):
        what = "holds half a surrogate pair, which is no UTF-8 text"
        raise ConfigError(f"objective.environment: its reply to the answer {shown(answer)} {what}. Replace it there.")
    return said
