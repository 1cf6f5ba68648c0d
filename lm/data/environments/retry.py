"""An environment that asks again until an answer is right."""

from typing import Literal

from lm.data.environments.base import EnvironmentConfig
from lm.data.rewards.base import Answer, RewardConfig
from lm.data.rewards.text import ExactReward


class RetryConfig(EnvironmentConfig):
    """Says that the answer is wrong, as long as its reward is below `until`."""

    kind: Literal["retry"] = "retry"
    reward: RewardConfig = ExactReward()
    """What decides whether an answer is right."""
    until: float = 1.0
    """What that gives to a right one."""
    says: str = "That is wrong. Try again."
    """The reply."""

    def compares(self) -> bool:
        return self.reward.compares

    def reply(self, answer: Answer) -> str | None:
        return self.says if self.reward.score(answer) < self.until else None
