"""On-policy objectives: sample answers from the current model, and raise the likelihood of those with more reward than the others to
the same prompt."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lm.data.rewards.base import Answer, scores, total
from lm.data.rows.policy import GRPOConfig, PolicyConfig, RLOOConfig
from lm.data.rows.seq2seq import one_per_row, rounded
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.generation.decode import eager
from lm.generation.rollouts import Drawer, Question, Rollout, Sampler, questions_of
from lm.losses.auxiliary import with_auxiliary
from lm.losses.cross_entropy import LossSums, mean_of
from lm.losses.likelihoods import label_likelihoods
from lm.losses.measure import Start
from lm.nn.batch import Batch
from lm.nn.head import Reader
from lm.nn.transformer import LM
from lm.ops.precision import widest
from lm.storage.checkpoint import ALONE, CheckpointReader, Piece
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of
from lm.training.objectives.judged import Judged
from lm.training.weights.initial import start_of, tokenizer_of

_ANSWERS = "answers"  # what a checkpoint has them by
_EPS = 1e-4  # added to the standard deviation of a group's rewards
C = TypeVar("C", bound=PolicyConfig)


class OwnAnswers:
    """Base of the on-policy objectives. Samples are a function of (seed, step, row, number in the group), however a step is split over
    ranks and micro-batches."""

    def __init__(self, sampler: Drawer, pad: int, seed: int, compiled: bool) -> None:
        """compiled: the model is compiled, so sampling must switch to eager."""
        self._sampler, self._pad, self._seed, self._compiled = sampler, pad, seed, compiled
        self.spent = {"draw_s": 0.0}  # seconds so far, by name

    def draw(
        self, model: LM, questions: Sequence[Question], n: int, step: int, rows: Iterable[int], temperature: float = 1.0
    ) -> list[Rollout]:
        """Returns n rollouts for each prompt, prompt after prompt.  rows: the index of each among all rows of the step."""
        keys = [f"{self._seed}/{step}/{row}" for row in rows]
        with eager(self._compiled), self._timed("draw_s", model.embed.weight.device):
            return self._sampler.draw(model, questions, n, temperature, keys)

    @contextmanager
    def _timed(self, name: str, device: torch.device) -> Iterator[None]:
        """Counts the seconds of the block by this name. What the device had to do before is not part of it."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        yield
        self.spent[name] += time.perf_counter() - begun


class Policy(OwnAnswers, ABC, Generic[C]):
    """Base of the objectives that learn from rewards. A checkpoint between two steps that learn from the same answers holds these."""

    def __init__(
        self, cfg: C, sampler: Sampler, start: Start, pad: int, seed: int, compiled: bool = False, n_prompts: int = 0, width: int = 0
    ) -> None:
        """compiled: as in `OwnAnswers`; n_prompts: of a step; width: of the widest row."""
        super().__init__(sampler, pad, seed, compiled)
        self.spent["judge_s"] = 0.0
        self._cfg, self._judge, self._start, self._shape = cfg, sampler, start, (n_prompts * cfg.n_answers, width)
        self._kept: dict[int, Judged] = {}  # by the first row of their micro-batch
        self._reader: CheckpointReader | None = None

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        cfg = self._cfg
        draws, parts = step % cfg.updates_of_rows() == 0, cfg.parts_of_rows()
        if draws:
            self._kept[first_row] = self._answered(model, batch, step, first_row)
        elif first_row not in self._kept:
            self._kept[first_row] = self._read(first_row, batch)
        whole, n = self._kept[first_row], cfg.n_answers / parts
        if draws and parts > 1:
            with torch.no_grad():
                self._recall(model, whole, model(whole.rows, read=self._reader_of(whole)))
        judged = whole.part(step % parts, parts)
        logp, aux = model(judged.rows, read=with_auxiliary(self._reader_of(judged), 1 / n))  # (tokens,)
        seen = logp.detach()
        if draws and parts == 1:
            self._recall(model, whole, seen)
        loss, metrics = self.loss(logp, judged)
        unsure = -(seen / judged.lengths[judged.answer]).sum() / n
        told = {name: pair.to(seen.device) for name, pair in (judged.metrics | metrics).items()}
        return aux.beside(LossSums(loss / n, unsure, metrics=told))

    def _reader_of(self, judged: Judged) -> Reader:
        assert judged.rows.labels is not None
        n_labels = judged.rows.n_labels(judged.rows.labels)
        return label_likelihoods(judged.rows.labels, n=n_labels, temperature=self._cfg.temperature)

    def _recall(self, model: LM, judged: Judged, logp: Tensor) -> None:
        """Notes log p of answers just drawn.  logp: (tokens,) under the model that has drawn them."""
        judged.metrics["logp_gap"] = mean_of((logp - judged.logp).abs().max(), 1)
        judged.logp = logp
        judged.start = self._start(model, judged.rows, self._reader_of(judged)) if self._cfg.kl else None

    @abstractmethod
    def loss(self, logp: Tensor, judged: Judged) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss summed over answers, and metrics as (2,) pairs by name.  logp: (tokens,) under the model."""

    def pieces(self, step: int) -> Iterator[Piece]:
        """Yields this rank's answers from which further steps learn, for a checkpoint of this step."""
        rows, width = self._shape
        for first_row, judged in self._kept.items() if step % self._cfg.updates_of_rows() else ():
            for kind, tensor in judged.packed(width).items():
                yield Piece(_ANSWERS, kind, (rows, tensor.shape[1]), (first_row * self._cfg.n_answers, 0), tensor, ALONE)

    def resume(self, reader: CheckpointReader) -> None:
        """Goes on with the answers of a checkpoint."""
        self._reader = reader

    def _read(self, first_row: int, batch: Batch) -> Judged:
        """Returns the answers to a batch's prompts in the checkpoint. Raises CheckpointError where there are none."""
        reader, n = self._reader, self._cfg.n_answers
        assert reader is not None
        at, size = (first_row * n, 0), len(batch.tokens) * n
        found = {kind: reader.read(_ANSWERS, kind, at, (size, reader.shape(_ANSWERS, kind)[1])) for kind in reader.kinds(_ANSWERS)}
        reader.close()
        return Judged.unpacked(found, n, batch.tokens.device)

    def _answered(self, model: LM, batch: Batch, step: int, first_row: int) -> Judged:
        """Returns answers of this model to the prompts of a batch."""
        questions, device = questions_of(batch), batch.tokens.device
        rows = range(first_row, first_row + len(questions))
        rollouts = self.draw(model, questions, self._cfg.n_answers, step, rows, self._cfg.temperature)
        with self._timed("judge_s", device):
            answers = self._judge.answers(rollouts, device)
            worth, metrics = self._judged(answers)
        learned = one_per_row([one.example() for one in rollouts], self._pad).to(device)
        learns = torch.tensor([one.ended or self._cfg.learn_cut for one in answers]).to(device)
        logp = torch.tensor([value for rollout in rollouts for value in rollout.logprobs], dtype=torch.float32).to(device)
        return Judged(learned, worth.view(-1, self._cfg.n_answers).to(device, widest(device)), learns, metrics, logp)

    def _judged(self, answers: Sequence[Answer]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (answers,) total rewards, and metrics as (2,) pairs by name."""
        rewards = self._cfg.rewards
        each = scores(rewards, answers, self._cfg.threads)
        worth = torch.tensor([total(rewards, one) for one in each], dtype=torch.float64)
        metrics = {f"reward_{name}": [one[name] for one in each] for name in rewards} if len(rewards) > 1 else {}
        metrics |= {"reward": worth.tolist(), "answer_tokens": [answer.n_tokens for answer in answers]}
        metrics |= {"ended": [float(answer.ended) for answer in answers]}
        groups = worth.view(-1, self._cfg.n_answers)
        metrics |= {"reward_std": groups.std(1).tolist(), "frac_reward_zero_std": _alike(groups).double().tolist()}
        if self._cfg.environment is not None:
            metrics["answers"] = [1.0 + len(answer.earlier) for answer in answers]
        return worth, {name: mean_of(torch.tensor(sum(values), dtype=torch.float64), len(values)) for name, values in metrics.items()}


class GRPO(Policy[GRPOConfig]):
    """-min(r A, clip(r) A) of each token, where A = (reward - mean of its group) / standard deviation of the group, and r = p / p of the
    model that has drawn; plus kl times the estimate of the KL divergence of equation 4. Shao et al. 2024, arXiv:2402.03300, equation 3."""

    def loss(self, logp: Tensor, judged: Judged) -> tuple[Tensor, dict[str, Tensor]]:
        cfg, metrics, n = self._cfg, dict[str, Tensor](), len(logp)
        advantage = (judged.worth - judged.worth.mean(1, keepdim=True)).masked_fill(_alike(judged.worth).unsqueeze(1), 0.0)
        if cfg.scale:
            advantage = advantage / (judged.worth.std(1, keepdim=True) + _EPS)
        gain, moved = advantage.flatten().to(logp.dtype)[judged.answer], logp - judged.logp
        if cfg.ratio == "answer":
            moved = (moved.new_zeros(len(judged.lengths)).index_add(0, judged.answer, moved) / judged.lengths)[judged.answer]
        ratio, most = moved.exp(), cfg.clip if cfg.clip_high is None else cfg.clip_high
        free, clipped = ratio * gain, ratio.clamp(1 - cfg.clip, 1 + most) * gain
        each = -torch.minimum(free, clipped)
        if cfg.updates_of_rows() > 1:
            for side, beyond in {"low": ratio < 1 - cfg.clip, "high": ratio > 1 + most}.items():
                metrics[f"frac_clipped_{side}"] = mean_of((beyond & (clipped < free)).sum().to(logp.dtype), n)
        if judged.start is not None:
            gap = judged.start - logp
            divergence = gap.exp() - gap - 1
            metrics["kl"] = mean_of(divergence.detach().sum(), n)
            each = each + cfg.kl * divergence
        return (each / self._divisors(judged.lengths * judged.learns)[judged.answer]).sum(), metrics

    def _divisors(self, lengths: Tensor) -> Tensor:
        """Returns (answers,): what the sum over each answer's tokens is divided by; infinity for answers that are not learned from."""
        each = lengths.float()
        if self._cfg.per_token == "group":
            each = each.view(-1, self._cfg.n_answers).mean(1).repeat_interleave(self._cfg.n_answers)
        elif self._cfg.per_token == "constant":
            each = torch.full_like(each, self._cfg.room)
        return torch.where(lengths > 0, each, torch.inf)


class RLOO(Policy[RLOOConfig]):
    """-A log p of each answer, where A = its reward - the mean reward of the others in its group, each reward first reduced by
    kl * log(p / p of the starting model). Ahmadian et al. 2024, arXiv:2402.14740, section 3.3."""

    def loss(self, logp: Tensor, judged: Judged) -> tuple[Tensor, dict[str, Tensor]]:
        worth, metrics = judged.worth, dict[str, Tensor]()
        if judged.start is not None:
            gap = logp.detach() - judged.start
            metrics["kl"] = mean_of(gap.sum(), len(gap))
            worth = worth - self._cfg.kl * logp.new_zeros(len(judged.lengths)).index_add(0, judged.answer, gap).view_as(worth)
        others = (worth.sum(1, keepdim=True) - worth) / (worth.shape[1] - 1)
        gain = (worth - others).masked_fill(_alike(worth).unsqueeze(1), 0.0)
        advantage = (gain.flatten() * judged.learns).to(logp.dtype)
        return (-advantage[judged.answer] * logp).sum(), metrics


def _alike(groups: Tensor) -> Tensor:
    """(prompts,) whether all rewards of a group are the same. Their mean is rounded, so that neither their spread nor what they are above
    it need be 0.  groups: (prompts, n_answers)."""
    most, least = groups.amax(1), groups.amin(1)
    return most - least <= 8 * torch.finfo(groups.dtype).eps * torch.maximum(most.abs(), least.abs())


@loss_of(GRPOConfig)
def _grpo(cfg: GRPOConfig, run: TrainConfig) -> GRPO:
    return GRPO(cfg, *_parts(cfg, run))


@loss_of(RLOOConfig)
def _rloo(cfg: RLOOConfig, run: TrainConfig) -> RLOO:
    return RLOO(cfg, *_parts(cfg, run))


def _parts(cfg: PolicyConfig, run: TrainConfig) -> tuple[Sampler, Start, int, int, bool, int, int]:
    """Returns the arguments of `Policy` after its config."""
    tokenizer = tokenizer_of_answers(run)
    sampler = Sampler(tokenizer, cfg, in_step=run.strategy.slices_weights)
    shape = run.data.global_batch, rounded(run.data.seq_len)
    return sampler, start_of(run), tokenizer.pad, run.seeds.dropout, run.trainer.compile, *shape


def tokenizer_of_answers(run: TrainConfig) -> Tokenizer:
    """Returns the run's tokenizer, with the chat template that its data ask for."""
    tokenizer = tokenizer_of(run)
    if (template := run.data.chat_template(tokenizer)) is not None:
        tokenizer.chat_template = template
    return tokenizer
