"""On-policy distillation: sample answers from the current model, and learn what a teacher says at each of their tokens."""

import numpy as np
import torch
from torch import Tensor

from lm.data.layout.examples import Example
from lm.data.order import uniforms
from lm.data.rows.policy import GKDConfig
from lm.data.rows.seq2seq import one_per_row
from lm.generation.rollouts import Drawer, Rollout, questions_of
from lm.generation.teacher import frozen
from lm.losses.cross_entropy import LossSums, mean_of
from lm.losses.measure import Reference
from lm.losses.teacher import SoftTargets
from lm.losses.tokens import causal_reader
from lm.nn.batch import IGNORED, Batch
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.transformer import LM
from lm.training.config import TrainConfig
from lm.training.objectives.base import loss_of
from lm.training.objectives.policy import OwnAnswers, tokenizer_of_answers


class GKD(OwnAnswers):
    """The divergence from the teacher, its mean over the tokens of each answer: the model's own, or, for a part of the rows that is a
    function of (seed, step, row) too, the data's. Agarwal et al. 2023, arXiv:2306.13649, algorithm 1 and section 3."""

    def __init__(self, cfg: GKDConfig, sampler: Drawer, teacher: Reference, pad: int, seed: int, compiled: bool = False) -> None:
        """compiled: as in `OwnAnswers`."""
        super().__init__(sampler, pad, seed, compiled)
        self._cfg, self._teacher = cfg, teacher

    def __call__(self, model: LM, batch: Batch, step: int, first_row: int) -> LossSums:
        answers, drawn = self._answers(model, batch, step, first_row)
        examples = [Example.of(np.array(prompt), np.array(tokens)) for prompt, tokens in answers]
        learned = one_per_row(examples, self._pad).to(batch.tokens.device)
        labels = learned.labels
        assert labels is not None
        soft = self._teacher(learned, self._soft_targets)
        counted = labels != IGNORED
        shares = counted / counted.sum(-1, keepdim=True)  # 1 in each row
        reader = causal_reader(labels, chunk=self._cfg.chunk, n_labels=learned.n_labels(labels), teacher=soft, shares=shares)
        sums: LossSums = model(learned, read=reader)
        told = {"answer_tokens": sum(len(one.tokens) for one in drawn), "ended": sum(self._sampler.ended(one) for one in drawn)}
        for name, total in told.items():
            sums.metrics[name] = mean_of(torch.tensor(total, dtype=torch.float64), len(drawn)).to(labels.device)
        return sums

    def _answers(self, model: LM, batch: Batch, step: int, first_row: int) -> tuple[list[tuple[list[int], list[int]]], list[Rollout]]:
        """Returns prompt and answer of each row, and the model's own answers among them."""
        questions, rows = questions_of(batch), np.arange(first_row, first_row + len(batch.tokens))
        own = uniforms(self._seed, step, rows, 1)[:, 0] < self._cfg.on_policy
        chosen = np.flatnonzero(own | self._sampler.in_step)  # where ranks share each forward, all draw for all rows
        drawn = dict(zip(chosen, self.draw(model, [questions[i] for i in chosen], 1, step, rows[chosen]), strict=True))
        answers = [drawn[i].tokens if own[i] else one.reference for i, one in enumerate(questions)]
        return [(one.prompt, tokens) for one, tokens in zip(questions, answers, strict=True)], [drawn[i] for i in np.flatnonzero(own)]

    def _soft_targets(self, hidden: Tensor, head: Head, ctx: Context) -> SoftTargets:
        return SoftTargets(hidden.flatten(0, -2), head, 1.0, self._cfg.teacher_temperature, self._cfg.teacher_beta)


@loss_of(GKDConfig)
def _gkd(cfg: GKDConfig, run: TrainConfig) -> GKD:
    tokenizer = tokenizer_of_answers(run)
    sampler = Drawer(tokenizer, cfg.max_tokens, in_step=run.strategy.slices_weights)
    teacher = Reference(lambda: frozen(cfg.teacher, run.strategy.slices_weights))
    return GKD(cfg, sampler, teacher, tokenizer.pad, run.seeds.dropout, run.trainer.compile)
