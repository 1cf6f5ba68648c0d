"""A model's own answers to the prompts of labelled rows, and their rewards."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lm.data.environments.base import reply_of
from lm.data.layout.examples import Example
from lm.data.order import Ids
from lm.data.rewards.base import Answer, in_threads, scores, total
from lm.data.rows.base import ObjectiveConfig, Rows
from lm.data.rows.policy import OwnAnswersConfig, PolicyConfig
from lm.data.rows.reward import judged_batch
from lm.data.tokenizer.around import closing_of, opening_of, replying
from lm.data.tokenizer.together import together
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.decode import go_on, rows_of
from lm.generation.evaluate import Evaluator
from lm.generation.loop import ROWS, Vocabulary
from lm.generation.teacher import frozen
from lm.generation.text import ends_of
from lm.losses.likelihoods import row_scores
from lm.losses.measure import Reference
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM
from lm.schema import MOST, Tree


@dataclass(frozen=True)
class Question:
    """A prompt, and the data's own answer to it."""

    prompt: list[int]
    reference: list[int]


@dataclass(frozen=True)
class Rollout:
    """The model's answer to a prompt, with its end token if it has ended, and log p of each of its tokens; or several answers, and between
    them what an environment has replied."""

    question: Question
    tokens: list[int]
    logprobs: list[float]
    replies: tuple[tuple[int, int, str], ...] = ()  # where each begins and ends among the tokens, and its text

    def example(self) -> Example:
        """Returns what is learned from: the model's own tokens."""
        found = Example.of(np.array(self.question.prompt), np.array(self.tokens))
        for start, end, _ in self.replies:
            found.learned[len(self.question.prompt) + start : len(self.question.prompt) + end] = False
        return found

    def answers(self) -> list[list[int]]:
        """Returns the tokens of each answer."""
        edges = [0, *(edge for start, end, _ in self.replies for edge in (start, end)), len(self.tokens)]
        return [self.tokens[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


def questions_of(batch: Batch) -> list[Question]:
    """Returns the prompt of each row, and its labels.  batch: one example a row, whose labels follow its prompt."""
    assert batch.labels is not None
    return [_question(tokens, labels) for tokens, labels in zip(batch.tokens.cpu(), batch.labels.cpu(), strict=True)]


def _question(tokens: Tensor, labels: Tensor) -> Question:
    at = labels != IGNORED
    return Question(tokens[: int(at.nonzero()[0]) + 1].tolist(), labels[at].tolist())


class _Draws(SamplingConfig):
    """Draws of which log p is told as they are drawn."""

    def told(self, logits: Tensor) -> Tensor:
        return logits / self.temperature if self.temperature else logits


class Drawer:
    """Draws answers from a model by its own probabilities, at a temperature, with the cache."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, in_step: bool) -> None:
        """in_step: every call for so many answers makes the same number of forwards, whatever the prompts are and whatever is drawn, as is
        needed where each rank holds a part of the weights."""
        self._max_tokens, self.in_step = max_tokens, in_step
        self._vocabulary, self._ends = Vocabulary(tokenizer.vocab_size, pad=tokenizer.pad), ends_of(tokenizer)

    def ended(self, rollout: Rollout) -> bool:
        """Says whether the model has ended the answer itself."""
        return rollout.tokens[-1] in self._ends

    def draw(self, model: LM, questions: Sequence[Question], n: int, temperature: float = 1.0, keys: Sequence[str] = ()) -> list[Rollout]:
        """Returns n answers to each prompt in turn.  keys: one for each prompt, which seeds its draws; none: the prompt's tokens do."""
        cfg = _Draws(n=n, max_tokens=self._max_tokens, temperature=temperature, logprobs=0)
        if self.in_step:
            cfg = cfg.replace(prefill_chunk=MOST)
        rows = rows_of(model, [one.prompt for one in questions], cfg, self._vocabulary)
        for i, key in enumerate(keys):
            for j, row in enumerate(rows[i * n : (i + 1) * n]):
                row.key = hashlib.blake2b(f"{key}/{j}".encode(), digest_size=16).digest()
        on_token = None if self.in_step else lambda row, token: token in self._ends
        at_once = ROWS if self.in_step else max(1, len(rows))
        for start in range(0, len(rows), at_once):
            go_on(model, rows[start : start + at_once], cfg, self._vocabulary, on_token)
        found = []
        for row in rows:
            length = next((at for at, token in enumerate(row.new, 1) if token in self._ends), len(row.new))
            logprobs = [told.logprob for told in row.logprobs[:length]]
            found.append(Rollout(questions[row.index // n], row.new[:length], logprobs))
        return found


class Sampler(Drawer):
    """Draws answers, and scores them."""

    def __init__(self, tokenizer: Tokenizer, cfg: PolicyConfig, in_step: bool) -> None:
        super().__init__(tokenizer, cfg.max_tokens, in_step)
        self._tokenizer, self._closing = tokenizer, closing_of(tokenizer)
        self._opening = tokenizer.decode(opening_of(tokenizer))
        self._environment, self._room, self._threads = cfg.environment, cfg.room, cfg.threads
        self._replying = None if cfg.environment is None else replying(tokenizer, cfg.environment.role)
        if self._replying is not None:
            self._require_room(len(together(tokenizer, self._replying(""))[0]) + cfg.max_tokens, cfg.room)
        self._judge = None if (path := cfg.reward_model) is None else Reference(lambda: frozen(path, in_step))

    def draw(self, model: LM, questions: Sequence[Question], n: int, temperature: float = 1.0, keys: Sequence[str] = ()) -> list[Rollout]:
        """As that of `Drawer`; where an environment replies, the model answers again."""
        draw, environment = super().draw, self._environment
        found = draw(model, questions, n, temperature, keys)
        if environment is None:
            return found
        going = dict(enumerate(found))
        for number in range(1, environment.answers):
            ended = [i for i in going if self.ended(found[i])]
            said = in_threads(self._threads, partial(reply_of, environment), [self._answer(found[i], None) for i in ended])
            replied = {i: self._replied(found[i], reply) for i, reply in zip(ended, said, strict=True) if reply is not None}
            if not (going := {i: one for i, one in replied.items() if one is not None}):
                break
            again = [Question([*one.question.prompt, *one.tokens], []) for one in going.values()]
            drawn = draw(model, again, 1, temperature, [f"{keys[i // n]}/{i % n}/{number}" for i in going] if keys else ())
            for (i, one), new in zip(going.items(), drawn, strict=True):
                found[i] = replace(one, tokens=[*one.tokens, *new.tokens], logprobs=[*one.logprobs, *new.logprobs])
        return found

    def _replied(self, rollout: Rollout, said: str) -> Rollout | None:
        """Returns the rollout with this reply to its last answer; None where there is no room for another answer."""
        assert self._replying is not None
        if len(self._tokenizer.encode_arrays([said.strip()])[0]) > self._room:  # to write a page of megabytes into a chat takes long
            return None
        behind = self._replying(said)
        begun = rollout.tokens[-1:] == behind[:1]  # the answer's own end
        tokens = [*rollout.tokens, *together(self._tokenizer, behind[begun:])[0].tolist()]
        if len(tokens) + self._max_tokens > self._room:
            return None
        return replace(rollout, tokens=tokens, replies=(*rollout.replies, (len(rollout.tokens), len(tokens), said)))

    @staticmethod
    def _require_room(least: int, room: int) -> None:
        """Raises ConfigError where no reply could ever be answered.  least: of an answer's end, an empty reply and another answer."""
        if least > room:
            what = f"the end of an answer, an empty reply as the chat template writes it and another answer of max_tokens take {least}"
            raise ConfigError(f"objective.environment.room={room}: {what}. Raise it, or lower objective.max_tokens.")

    def answers(self, rollouts: Sequence[Rollout], device: torch.device) -> list[Answer]:
        """Returns what rewards see of each rollout: prompt, answer and reference as texts, the answer's length, whether it has ended, and
        what a reward model says of its tokens, which computes on this device."""
        judged = [said for start in range(0, len(rollouts), ROWS) for said in self._judged(rollouts[start : start + ROWS], device)]
        return [self._answer(*each) for each in zip(rollouts, judged, strict=True)]

    def _answer(self, rollout: Rollout, learned: float | None) -> Answer:
        decode, ended, n = self._tokenizer.decode, self.ended(rollout), len(rollout.logprobs)
        *before, last = (decode(tokens) for tokens in rollout.answers())
        earlier = tuple((text, reply) for text, (_, _, reply) in zip(before, rollout.replies, strict=True))
        texts = (decode(rollout.question.prompt), last, decode(rollout.question.reference).removeprefix(self._opening))
        return Answer(*texts, n_tokens=n, ended=ended, learned=learned, earlier=earlier, opening=self._opening)

    def whole(self, rollout: Rollout) -> list[int]:
        """Returns the prompt, the answer and what the chat template writes behind the end of one: the tokens that a reward model reads."""
        end, *behind = self._closing or (None,)
        return [*rollout.question.prompt, *rollout.tokens, *(behind if rollout.tokens[-1] == end else [])]

    def _judged(self, rollouts: Sequence[Rollout], device: torch.device) -> list[float | None]:
        if self._judge is None:
            return [None] * len(rollouts)
        batch = judged_batch([np.array(self.whole(one)) for one in rollouts], self._tokenizer.pad).to(device)
        assert batch.labels is not None
        found: list[float | None] = self._judge(batch, row_scores(batch.labels)).tolist()
        return found


def held_out_rewards(evaluator: Evaluator, cfg: ObjectiveConfig, parts: Sequence[tuple[Rows, Ids]], in_step: bool = False) -> Tree:
    """Returns means over the model's greedy answers to these rows, as val_reward and others; {} where the objective trains for no reward.

    parts: rows, and the ids of those to answer, of which each process answers a part.  in_step: as of `Sampler`.
    """
    if not isinstance(cfg, PolicyConfig):
        return {}
    sampler, ranks, n = Sampler(evaluator.tokenizer, cfg, in_step), evaluator.ranks, sum(len(ids) for _, ids in parts)
    several = ["val_answers"] if cfg.environment is not None else []
    sums = dict.fromkeys(["val_reward", *_named(cfg), "val_answer_tokens", "val_ended", *several], 0.0)
    for rows, ids in parts:
        mine = ids[ranks.rank :: ranks.world]
        for start in range(0, len(ids[:: ranks.world]), ROWS):
            part = mine[start : start + ROWS]
            rollouts = sampler.draw(evaluator.model, questions_of(rows.batch(part if len(part) else ids[:1])), 1, temperature=0.0)
            answers = sampler.answers(rollouts, evaluator.model.embed.weight.device)  # of all, as ranks may share a reward model's weights
            judged = answers[: len(part)]
            for answer, each in zip(judged, scores(cfg.rewards, judged, cfg.threads), strict=True):
                told = [total(cfg.rewards, each), *(each[name] for name in _named(cfg).values()), answer.n_tokens, answer.ended]
                told += [1 + len(answer.earlier) for _ in several]
                sums = {name: before + value for (name, before), value in zip(sums.items(), told, strict=True)}
    return {name: value / n for name, value in zip(sums, ranks.total(*sums.values()), strict=True)}


def told_answers(model: LM, tokenizer: Tokenizer, cfg: OwnAnswersConfig, rows: Rows, ids: Ids, in_step: bool) -> list[Sequence[str]]:
    """Returns for each of these rows the prompt, the model's most likely answer, and what the rewards say of it.  in_step: as of
    `Drawer`."""
    if not isinstance(cfg, PolicyConfig):
        drawer = Drawer(tokenizer, cfg.max_tokens, in_step)
        drawn = drawer.draw(model, questions_of(rows.batch(ids)), 1, temperature=0.0)
        return [[tokenizer.decode(one.question.prompt), tokenizer.decode(one.tokens)] for one in drawn]
    sampler, found = Sampler(tokenizer, cfg, in_step), list[Sequence[str]]()
    drawn = sampler.draw(model, questions_of(rows.batch(ids)), 1, temperature=0.0)
    answers = sampler.answers(drawn, model.embed.weight.device)
    for one, answer, each in zip(drawn, answers, scores(cfg.rewards, answers, cfg.threads), strict=True):
        # + 0: minus zero is shown as zero
        worth = f"reward {total(cfg.rewards, each):g}: {', '.join(f'{name} {score + 0:g}' for name, score in each.items())}"
        compared = f"\nreference {answer.reference.strip()}" if any(reward.compares for reward in cfg.rewards.values()) else ""
        found.append([answer.prompt, tokenizer.decode(one.tokens) if answer.earlier else answer.text, worth + compared])
    return found


def _named(cfg: PolicyConfig) -> dict[str, str]:
    """Returns the rewards that are told on their own, by the names of their figures; {} unless there are several rewards."""
    return {f"val_reward_{name}": name for name in cfg.rewards} if len(cfg.rewards) > 1 else {}
