"""On-policy objectives: sample answers from the current model, and raise the likelihood of those with more reward than the others to
the same prompt."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lm.data.layout.examples import Example, joined_batch
from lm.data.rewards.base import Answer, scores, total
from lm.data.rows.policy import GRPOConfig, PolicyConfig, RLOOConfig
from lm.data.rows.seq2seq import rounded
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.generation.decode import eager
from lm.generation.rollouts import Asked, Drawer, Rollout, Sampler, asked_of
from lm.losses.balance import with_balance
from lm.losses.cross_entropy import LossSums, mean_of
from lm.losses.likelihoods import label_likelihoods
from lm.losses.measure import Start
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM
from lm.ops.precision import widest
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of
from lm.training.weights.initial import start_of, tokenizer_of

_EPS = 1e-4  # added to the standard deviation of a group's rewards
C = TypeVar("C", bound=PolicyConfig)


class OwnAnswers:
    """Base of the on-policy objectives. Samples are a function of (seed, step, row, number in the group), however a step is split over
    ranks and micro-batches."""

    def __init__(self, sampler: Drawer, pad: int, seed: int, compiled: bool) -> None:
        """compiled: the model is compiled, so sampling must switch to eager."""
        self._sampler, self._pad, self._seed, self._compiled = sampler, pad, seed, compiled

    def draw(self, model: LM, asked: Sequence[Asked], n: int, step: int, rows: Iterable[int]) -> list[Rollout]:
        """Returns n rollouts for each prompt, prompt after prompt.  rows: the index of each among all rows of the step."""
        keys = [f"{self._seed}/{step}/{row}" for row in rows]
        with eager(self._compiled):
            return self._sampler.draw(model, asked, n, keys=keys)


@dataclass
class Judged:
    """The answers to the prompts of a micro-batch, and what they are worth."""

    rows: Batch  # one for each answer
    answer: Tensor  # (tokens,) the index of each token's
    lengths: Tensor  # (answers,) in tokens
    learned: Tensor  # (answers,) the same, and 0 of one that is not learned from
    worth: Tensor  # (prompts, n_answers) rewards, float64 where the device has it
    told: Tensor  # (tokens,) log p in the sampler
    metrics: dict[str, Tensor]  # (2,) by name
    drawn: Tensor | None = None  # (tokens,) log p under the model that has drawn them, as training computes it; None until it does
    before: Tensor | None = None  # (tokens,) log p under the starting model; None without a kl term


class Policy(OwnAnswers, ABC, Generic[C]):
    """Base of the objectives that learn from rewards. Answers are kept for as many steps as learn from them; where a callback of one's own
    has ended the run between two of these, a resumed one draws others."""

    def __init__(self, cfg: C, sampler: Sampler, start: Start, pad: int, seed: int, compiled: bool = False) -> None:
        """compiled: as in `OwnAnswers`."""
        super().__init__(sampler, pad, seed, compiled)
        self._cfg, self._judge, self._start = cfg, sampler, start
        self._kept: dict[int, Judged] = {}  # by the first row of their micro-batch

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        updates, n = self._cfg.updates_of_rows(), self._cfg.n_answers
        if step % updates == 0 or first_row not in self._kept:
            self._kept[first_row] = self._answered(model, batch, step, first_row)
        judged = self._kept[first_row] if updates > 1 else self._kept.pop(first_row)
        assert judged.rows.labels is not None
        reader = label_likelihoods(judged.rows.labels, n=judged.rows.n_labels(judged.rows.labels))
        logp, experts = model(judged.rows, read=with_balance(reader, 1 / n))  # (tokens,)
        seen = logp.detach()
        if judged.drawn is None:
            judged.drawn, judged.before = seen, self._start(model, judged.rows, reader) if self._cfg.kl else None
            judged.metrics["logp_gap"] = mean_of((seen - judged.told).abs().max(), 1)
        loss, metrics = self.loss(logp, judged.drawn, judged)
        if judged.before is not None:
            metrics["kl"] = mean_of((seen - judged.before).sum(), len(seen))
        told = {name: pair.to(seen.device) for name, pair in (judged.metrics | metrics).items()}
        unsure = -(seen / judged.lengths[judged.answer]).sum() / n
        return experts.beside(LossSums(loss / n, unsure, metrics=told))

    @abstractmethod
    def loss(self, logp: Tensor, drawn: Tensor, judged: Judged) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss summed over answers, and metrics as (2,) pairs by name.

        logp: (tokens,) log p of the answers' tokens under the model; drawn: the same under the model that has drawn them.
        """

    def _answered(self, model: LM, batch: Batch, step: int, first_row: int) -> Judged:
        """Returns answers of this model to the prompts of a batch."""
        asked, device = asked_of(batch), batch.tokens.device
        rollouts = self.draw(model, asked, self._cfg.n_answers, step, range(first_row, first_row + len(asked)))
        answers = self._judge.answers(rollouts, device)
        worth, metrics = self._judged(answers)
        rows = answer_rows([one.example() for one in rollouts], self._pad).to(device)
        assert rows.labels is not None
        answer = torch.nonzero(rows.labels != IGNORED)[:, 0]
        lengths = answer.bincount(minlength=worth.numel())
        learns = torch.tensor([one.ended or self._cfg.learn_cut for one in answers]).to(device)
        worth = worth.view(-1, self._cfg.n_answers).to(device, widest(device))
        told = torch.tensor([value for rollout in rollouts for value in rollout.logprobs], dtype=torch.float32).to(device)
        return Judged(rows, answer, lengths, lengths * learns, worth, told, metrics)

    def _judged(self, answers: Sequence[Answer]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (answers,) total rewards, and metrics as (2,) pairs by name."""
        rewards = self._cfg.rewards
        each = scores(rewards, answers, self._cfg.threads)
        worth = torch.tensor([total(rewards, one) for one in each], dtype=torch.float64)
        metrics = {f"reward_{name}": [one[name] for one in each] for name in rewards} if len(rewards) > 1 else {}
        metrics |= {"reward": worth.tolist(), "answer_tokens": [answer.n_tokens for answer in answers]}
        metrics |= {"ended": [float(answer.ended) for answer in answers]}
        spread = worth.view(-1, self._cfg.n_answers).std(1)
        metrics |= {"reward_std": spread.tolist(), "frac_reward_zero_std": (spread == 0).double().tolist()}
        if self._cfg.environment is not None:
            metrics["answers"] = [1.0 + len(answer.earlier) for answer in answers]
        return worth, {name: mean_of(torch.tensor(sum(values), dtype=torch.float64), len(values)) for name, values in metrics.items()}


class GRPO(Policy[GRPOConfig]):
    """-min(r A, clip(r) A) of each token, where A = (reward - mean of its group) / standard deviation of the group, and r = p / p of the
    model that has drawn; plus kl times the estimate of the KL divergence of equation 4. Shao et al. 2024, arXiv:2402.03300, equation 3."""

    def loss(self, logp: Tensor, drawn: Tensor, judged: Judged) -> tuple[Tensor, dict[str, Tensor]]:
        cfg, metrics = self._cfg, dict[str, Tensor]()
        advantage = judged.worth - judged.worth.mean(1, keepdim=True)
        if cfg.scale:
            advantage = advantage / (judged.worth.std(1, keepdim=True) + _EPS)
        gain, moved = advantage.flatten().to(logp.dtype)[judged.answer], logp - drawn
        if cfg.ratio == "answer":
            moved = (moved.new_zeros(len(judged.lengths)).index_add(0, judged.answer, moved) / judged.lengths)[judged.answer]
        ratio = moved.exp()
        most = cfg.clip if cfg.clip_high is None else cfg.clip_high
        free, clipped = ratio * gain, ratio.clamp(1 - cfg.clip, 1 + most) * gain
        each = -torch.minimum(free, clipped)
        if cfg.updates > 1:
            metrics["clipped"] = mean_of((clipped < free).sum().to(logp.dtype), len(logp))
        if judged.before is not None:
            gap = judged.before - logp
            each = each + cfg.kl * (gap.exp() - gap - 1)
        return (each / self._divisors(judged.learned)[judged.answer]).sum(), metrics

    def _divisors(self, lengths: Tensor) -> Tensor:
        """(answers,) by what the sum over an answer's tokens is divided: infinitely much where it is not learned from."""
        each = lengths.float()
        if self._cfg.per_token == "group":
            each = each.view(-1, self._cfg.n_answers).mean(1).repeat_interleave(self._cfg.n_answers)
        elif self._cfg.per_token == "constant":
            each = torch.full_like(each, self._cfg.room)
        return torch.where(lengths > 0, each, torch.inf)


class RLOO(Policy[RLOOConfig]):
    """-A log p of each answer, where A = its reward - the mean reward of the others in its group, each reward first reduced by
    kl * log(p / p of the starting model). Ahmadian et al. 2024, arXiv:2402.14740, section 3.3."""

    def loss(self, logp: Tensor, drawn: Tensor, judged: Judged) -> tuple[Tensor, dict[str, Tensor]]:
        worth = judged.worth
        if judged.before is not None:
            gap = logp.new_zeros(len(judged.lengths)).index_add(0, judged.answer, drawn - judged.before)
            worth = worth - self._cfg.kl * gap.view_as(worth)
        others = (worth.sum(1, keepdim=True) - worth) / (worth.shape[1] - 1)
        advantage = ((worth - others).flatten() * (judged.learned > 0)).to(logp.dtype)
        return (-advantage[judged.answer] * logp).sum(), {}


@loss_of(GRPOConfig)
def _grpo(cfg: GRPOConfig, run: TrainConfig) -> GRPO:
    return GRPO(cfg, *_parts(cfg, run))


@loss_of(RLOOConfig)
def _rloo(cfg: RLOOConfig, run: TrainConfig) -> RLOO:
    return RLOO(cfg, *_parts(cfg, run))


def _parts(cfg: PolicyConfig, run: TrainConfig) -> tuple[Sampler, Start, int, int, bool]:
    """Returns the arguments of `Policy` after its config."""
    tokenizer = tokenizer_of_answers(run)
    sampler = Sampler(tokenizer, cfg, in_step=run.strategy.slices_weights)
    return sampler, start_of(run), tokenizer.pad, run.seeds.dropout, run.trainer.compile


def tokenizer_of_answers(run: TrainConfig) -> Tokenizer:
    """Returns the run's tokenizer, with the chat template that its data ask for."""
    tokenizer = tokenizer_of(run)
    if (template := run.data.chat_template(tokenizer)) is not None:
        tokenizer.chat_template = template
    return tokenizer


def answer_rows(examples: Sequence[Example], pad: int) -> Batch:
    """Returns a batch with one row per example: a prompt, and the answer that is learned."""
    return joined_batch([[one] for one in examples], rounded(max(len(one.tokens) - 1 for one in examples)), pad)
