"""Rows of prompts that a model answers itself, to learn from the rewards of its answers, or from a teacher."""

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lm.data.config import DataConfig
from lm.data.environments.base import EnvironmentConfig
from lm.data.layout.examples import Example
from lm.data.order import Ids
from lm.data.records.base import LEARNED
from lm.data.records.prompt import PromptRecord
from lm.data.rewards.base import RewardConfig
from lm.data.rewards.model import LearnedReward
from lm.data.rewards.text import ExactReward
from lm.data.rows.base import Material, ObjectiveConfig, Rows, TaughtConfig
from lm.data.rows.parted import PartedRows
from lm.data.rows.seq2seq import one_per_row
from lm.data.tokenizer.around import closing_of
from lm.nn.batch import Batch
from lm.nn.head import HeadConfig
from lm.schema import Named, Tree
from lm.units import counted


class OwnAnswersConfig(ObjectiveConfig):
    """What objectives share that learn from the model's own answers, drawn from the model as it is at each step."""

    shapes = ("chat", "prompt")
    packings = ("none",)
    needs_masked_documents = True
    own_answers = True
    trains_mtp = False

    max_tokens: int = Field(64, gt=0)
    """Most tokens of an answer; one that is longer is cut."""

    @property
    def room(self) -> int:
        """Most tokens behind a prompt."""
        return self.max_tokens

    @property
    def room_key(self) -> str:
        """The option that says so."""
        return "max_tokens" if self.room == self.max_tokens else "environment.room"

    def require_fit(self, model: str, data: DataConfig) -> None:
        super().require_fit(model, data)
        if self.room > data.seq_len:
            what = f"objective.{self.room_key}={self.room} is over data.seq_len={data.seq_len}, which holds a prompt as well"
            raise ValueError(f"{what}. Lower one or raise the other.")

    def rows(self, of: Material) -> Rows:
        return PromptRows(self, of)


class PolicyConfig(OwnAnswersConfig):
    """What objectives share that learn from rewards of the model's own answers."""

    usual_for = ("prompt",)
    needs_parent = True

    rewards: Named[RewardConfig] = Field({"exact": ExactReward()}, min_length=1)
    """What an answer is worth, by name, of which the weighted sum counts; one without `kind` is of the kind that its name says."""
    n_answers: int = Field(8, gt=1, le=1024)
    """Answers to each prompt, which are compared with each other."""
    environment: EnvironmentConfig | None = None
    """What replies to an answer, so that the model answers again; of all its answers each token is learned from by the rewards of the last.
    null: nothing does."""
    threads: int = Field(1, gt=0, le=1024)
    """Answers that are scored, and replied to, at a time, each in a thread: for plugins that wait for a server or another program."""
    temperature: float = Field(1.0, ge=0.01, le=100)
    """Logits are divided by it, where answers are drawn and where they are learned from: above 1, answers to a prompt differ more. Held-out
    prompts get the likeliest answer."""
    kl: float = Field(0.0, ge=0)
    """What a departure from the model at the start costs, in units of reward a nat. 0: nothing, and no such model is kept."""
    learn_cut: bool = True
    """Whether answers that max_tokens has cut are learned from; false: they are drawn and judged, and compared with, alone (overlong
    filtering; Yu et al. 2025, arXiv:2503.14476, section 3.4)."""
    reward_model: str | None = None
    """Model or run folder of objective=reward, of the same tokens, whose number the reward of kind learned is, the only one unless
    `rewards` are given."""

    @model_validator(mode="before")
    @classmethod
    def _it_alone_judges(cls, given: Tree) -> Tree:
        return given if given.get("reward_model") is None else {"rewards": {"learned": {}}} | given

    @model_validator(mode="after")
    def _asks_its_reward_model(self) -> Self:
        asked = any(isinstance(reward, LearnedReward) for reward in self.rewards.values())
        if asked and self.reward_model is None:
            raise ValueError("rewards: learned is what a reward model says, and there is none. Set objective.reward_model=FOLDER.")
        if self.reward_model is not None and not asked:
            raise ValueError("reward_model has no effect without its reward. Set objective.rewards={learned:{}}, or drop it.")
        return self

    @model_validator(mode="after")
    def _rewards_something(self) -> Self:
        if not any(reward.weight for reward in self.rewards.values()):
            raise ValueError(
                f"rewards: all weights are 0 ({', '.join(self.rewards)}), so that nothing is learned. Give one of them another."
            )
        return self

    @model_validator(mode="after")
    def _has_room_for_another_answer(self) -> Self:
        if self.environment is not None and self.room < 2 * self.max_tokens:
            what = f"environment.room={self.room} is less than two answers of max_tokens={self.max_tokens}"
            raise ValueError(f"{what}. Raise it, or lower max_tokens.")
        return self

    @property
    def texts(self) -> int:
        return self.n_answers

    @property
    def room(self) -> int:
        return self.max_tokens if self.environment is None else self.environment.room

    def why_not_in_step(self) -> str | None:
        return None if self.environment is None else "objective.environment replies to some answers and not to others"

    def judged(self, found: Tree) -> float:
        return -float(found["val_reward"])

    def runs_parent(self) -> bool:
        return self.kl > 0

    def learns_from(self) -> tuple[str, str] | None:
        return None if self.reward_model is None else ("objective.reward_model", self.reward_model)

    def why_not_from(self, its: HeadConfig, own: HeadConfig) -> str | None:
        if its.tells_number():
            return None
        return f"it is no reward model, which tells a number (model.head.labels={its.labels}). Train one by objective=reward"

    def require_fit(self, model: str, data: DataConfig) -> None:
        super().require_fit(model, data)
        comparing = [f"rewards.{name}" for name, reward in self.rewards.items() if reward.compares]
        comparing += ["environment"] if self.environment is not None and self.environment.compares() else []
        if comparing and _lacks_answers(data):
            raise ValueError(
                f"objective.{comparing[0]} compares with the data's answer, and data.record.answer names none. Name its field, or choose"
                " another."
            )


class GRPOConfig(PolicyConfig):
    """Raise what is worth more than other answers to the same prompt, in units of their spread (GRPO). It needs init_from.

    Shao et al. 2024, arXiv:2402.03300. With one update on each draw, the default, the ratio of equation 3 is 1, and nothing is clipped.
    """

    kind: Literal["grpo"] = "grpo"
    per_token: Literal["answer", "group", "constant"] = "answer"
    """What an answer's sum over its tokens is divided by. answer: its length (Shao et al. 2024, equation 3); group: the mean length of the
    answers to the prompt, of which one that is not learned from has none, so that all tokens that are learned count alike (DAPO; Yu et al.
    2025, equation 8); constant: max_tokens, or environment.room, so that long answers are not favoured among wrong ones (Liu et al. 2025,
    arXiv:2503.20783)."""
    scale: bool = True
    """Divide by the spread of a group's rewards (Shao et al. 2024, section 4.1.2); false: Liu et al. 2025."""
    updates: int = Field(1, gt=0, le=1024)
    """Times that each answer is learned from, all drawn before the first (mu of Shao et al. 2024, algorithm 1)."""
    minibatches: int = Field(1, gt=0, le=1024)
    """Steps that share a draw's prompts each time: each learns from the answers to a part of them (Schulman et al. 2017, section 5)."""
    clip: float = Field(0.2, gt=0, lt=1)
    """From the second of these on, an answer of less worth than others is not learned from where p / p when it was drawn is below 1 - clip
    (Schulman et al. 2017, arXiv:1707.06347, equation 7)."""
    clip_high: float | None = Field(None, gt=0)
    """Nor one of more worth where it is above 1 + clip_high; null: 1 + clip (0.28 beside 0.2: Yu et al. 2025, section 4.1)."""
    ratio: Literal["token", "answer"] = "token"
    """Of what that is the ratio. answer: of all its tokens, to the power of 1 / their number, with a clip of about 3e-4 (GSPO; Zheng et al.
    2025, arXiv:2507.18071, equation 7)."""

    def updates_of_rows(self) -> int:
        return self.updates * self.minibatches

    def parts_of_rows(self) -> int:
        return self.minibatches

    def held(self, rows: int) -> int:
        return super().held(rows) // self.minibatches


class RLOOConfig(PolicyConfig):
    """Raise what is worth more than the mean of the other answers to the same prompt: REINFORCE with that as baseline (RLOO). It needs
    init_from.

    Ahmadian et al. 2024, arXiv:2402.14740, section 3.3; a whole answer is one action, and `kl` is taken off its reward.
    """

    kind: Literal["rloo"] = "rloo"


class GKDConfig(OwnAnswersConfig, TaughtConfig):
    """Learn from a teacher what to say at each token of the model's own answers: on-policy distillation. It needs init_from.

    Generalized knowledge distillation, Agarwal et al. 2023, arXiv:2306.13649, algorithm 1: each answer's divergence is the mean over its
    tokens (section 3), whose choice has no gradient. An answer is the model's own with probability `on_policy`, the data's otherwise.
    """

    kind: Literal["gkd"] = "gkd"
    teacher: str
    """Model or run folder, with all tokens of the run, whose probabilities are learned at each token of an answer."""
    teacher_beta: float = Field(0.5, ge=0, le=1)
    """Which divergence from the teacher. 0: KL(teacher || model); 1: KL(model || teacher), reverse (Gu et al. 2023, arXiv:2306.08543);
    between: the generalized Jensen-Shannon divergence (Agarwal et al. 2023, equation 1), which tokens that the teacher never says do not
    make huge."""
    on_policy: float = Field(1.0, ge=0, le=1)
    """Part of the answers that the model draws itself; the others are the data's."""

    def require_fit(self, model: str, data: DataConfig) -> None:
        super().require_fit(model, data)
        if self.on_policy < 1 and _lacks_answers(data):
            raise ValueError(
                f"objective.on_policy={self.on_policy:g} learns from the data's answers too, and data.record.answer names none. Name its"
                " field, or set objective.on_policy=1."
            )


class PromptRows(PartedRows):
    """Row i is chat i up to the assistant's last answer, or prompt i, whose reference is in the labels: a reward may compare with it.

    A chat whose prompt leaves no room for objective.max_tokens in data.seq_len is dropped and counted.
    """

    def __init__(self, cfg: OwnAnswersConfig, of: Material) -> None:
        super().__init__(of.store, of.tokenizer, of.data.seq_len)
        parts, starts, n_tokens = of.store.parts, of.store.starts, of.store.n_tokens
        learned = np.flatnonzero(parts[:, 1] == LEARNED)
        self._bounds = np.zeros((len(starts), 3), np.int64)  # prompt, answer, end; a chat's last answer stays
        chat = np.searchsorted(starts, parts[learned, 0], "right") - 1
        ends = np.append(parts[1:, 0], n_tokens)[learned]
        self._bounds[chat] = np.stack([starts[chat], parts[learned, 0], ends], axis=1)
        prompt = self._bounds[:, 1] - self._bounds[:, 0]
        judged = isinstance(cfg, PolicyConfig) and cfg.reward_model is not None
        behind = len(closing_of(of.tokenizer)[1:]) if judged else -1  # a reward model reads the last token too
        self._kept = np.flatnonzero((prompt > 0) & (prompt + cfg.room + behind <= of.data.seq_len))
        self._require_most(len(self._kept), "prompts", f"leave no room for objective.{cfg.room_key}={cfg.room} in", f"lower {cfg.room_key}")
        whole = (self._bounds[:, 2] - self._bounds[:, 0])[self._kept]
        self._n_cut = int((whole > self._seq_len + 1).sum())

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """`step_tokens` counts prompts, not labels. A reference answer that goes beyond data.seq_len loses its end."""
        rows = [self._asked(*self._bounds[i].tolist()) for i in self._kept[ids]]
        batch = one_per_row(rows, self.pad)
        batch.step_tokens = len(ids)
        return batch

    def widths(self, ids: Ids) -> Sequence[Ids]:
        bounds = self._bounds[self._kept[ids]]
        return [bounds[:, 1] - bounds[:, 0]]

    def describe(self) -> str:
        cut = f"{self._store.split}: {counted(self._n_cut, 'reference answer')} cut at data.seq_len={self._seq_len}, for rewards too"
        return "; ".join(filter(None, [self._too_long("prompt"), cut * bool(self._n_cut)]))

    def _asked(self, start: int, begin: int, end: int) -> Example:
        read = self._store.read(start, min(end, start + self._seq_len + 1)).astype(np.int64)
        return Example.of(read[: begin - start], read[begin - start :])


def _lacks_answers(data: DataConfig) -> bool:
    """Returns whether a source has prompts alone."""
    return any(isinstance(each.records, PromptRecord) and each.records.answer is None for each in data.parts().values())
