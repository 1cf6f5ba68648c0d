"""The answers of a model to some prompts, and what they are worth: what on-policy objectives learn from, and a checkpoint keeps."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.data.rows.seq2seq import rounded
from lm.nn.batch import IGNORED, Batch
from lm.ops.precision import widest


@dataclass
class Judged:
    """The answers to the prompts of a micro-batch, and what they are worth."""

    rows: Batch  # one for each answer
    worth: Tensor  # (prompts, n_answers) rewards, float64 where the device has it
    learns: Tensor  # (answers,) whether it is learned from
    metrics: dict[str, Tensor]  # (2,) by name
    logp: Tensor  # (tokens,) log p in the sampler, and once training has computed it, there: under the model that has drawn them
    start: Tensor | None = None  # (tokens,) log p under the starting model; None without a kl term

    @cached_property
    def learned_at(self) -> Tensor:
        """(answers, w) where a label is a token of an answer."""
        assert self.rows.labels is not None
        return self.rows.labels != IGNORED

    @cached_property
    def answer(self) -> Tensor:
        """(tokens,) the index of each token's answer."""
        return torch.nonzero(self.learned_at)[:, 0]

    @cached_property
    def lengths(self) -> Tensor:
        """(answers,) in tokens."""
        return self.answer.bincount(minlength=self.worth.numel())

    def part(self, number: int, of: int) -> "Judged":
        """Returns the answers to every of-th prompt, from that of this number on, with the figures of all."""
        if of == 1:
            return self
        n = self.worth.shape[1]
        chosen = torch.arange(len(self.worth), device=self.worth.device) % of == number
        answers = chosen.repeat_interleave(n)
        tokens = answers[self.answer]
        start = None if self.start is None else self.start[tokens]
        return Judged(self.rows.picked(answers), self.worth[chosen], self.learns[answers], self.metrics, self.logp[tokens], start)

    def packed(self, width: int) -> dict[str, Tensor]:
        """Returns it as tensors with a row for each answer, by name.  width: of the widest row that there may be."""
        wide = {"tokens": self.rows.tokens, "labels": self.rows.labels, "positions": self.rows.positions}
        for name, each in {"logp": self.logp, "start": self.start}.items():
            if each is not None:
                wide[name] = torch.zeros_like(self.rows.tokens, dtype=torch.float32).masked_scatter(self.learned_at, each.float())
        none = {"labels": IGNORED, "positions": -1}
        more = width - self.rows.tokens.shape[1]
        found = {name: F.pad(each.float(), (0, more), value=none.get(name, 0)) for name, each in wide.items() if each is not None}
        found["worth"] = torch.stack([self.worth.flatten().cpu().double(), self.learns.cpu().double()], 1)
        first = torch.arange(len(self.rows.tokens)).unsqueeze(1) == 0  # figures of a micro-batch stand beside its first answer
        return found | {f"metric {name}": first * pair.cpu() for name, pair in self.metrics.items()}

    @classmethod
    def unpacked(cls, found: dict[str, Tensor], n_answers: int, device: torch.device) -> Self:
        """Returns the answers that were packed.  found: as `packed` returns it, or only some of its prompts, or several results joined."""
        width = rounded(int(found["positions"].max()) + 1)
        tokens, labels, places = (found[name][:, :width].long().to(device) for name in ("tokens", "labels", "positions"))
        logp, start = (found[name][:, :width].to(device)[labels != IGNORED] if name in found else None for name in ("logp", "start"))
        assert logp is not None
        worth, learns = found["worth"].to(device, widest(device)).unbind(1)
        metrics = {name.removeprefix("metric "): pairs.sum(0) for name, pairs in found.items() if name.startswith("metric ")}
        rows = Batch(tokens, labels, places, torch.where(places < 0, -1, 0))
        return cls(rows, worth.reshape(-1, n_answers), learns > 0, metrics, logp, start)
