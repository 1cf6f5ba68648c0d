"""What a reward model says of an answer."""

from typing import Literal

from lm.data.rewards.base import Answer, RewardConfig


class LearnedReward(RewardConfig):
    """The number that objective.reward_model tells at the end of the prompt and the answer."""

    kind: Literal["learned"] = "learned"

    def score(self, answer: Answer) -> float:
        assert answer.learned is not None
        return answer.learned
