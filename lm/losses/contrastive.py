"""The loss of texts that belong together: each is to be more like its own counterpart than like those of others."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.cross_entropy import LossSums, mean_of, with_error
from lm.losses.embeddings import WHOLE, InParts, first_of
from lm.losses.measure import Measure
from lm.losses.tokens import labelled_first
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM
from lm.ops.precision import without_autocast


class Contrastive(Measure):
    """-log of the softmax over candidates of cosine / temperature, at an anchor's own one, summed over anchors (InfoNCE; van den Oord et
    al. 2018, arXiv:1807.03748, equation 4); the mean over vectors and their beginnings, where these are to serve too (Kusupati et al. 2022,
    arXiv:2205.13147, equation 1).

    A batch has groups of rows: `among` anchors, whose labels count from 0, their positives in the same order, and any number of negatives.
    Candidates are the positives and negatives of the same group, but for those that are the same text as the anchor's own one.
    """

    less = ("ece", "error")
    of_text = False
    units = {"loss": "nats/pair", "similarity": "cosine"}

    def __init__(self, among: int, temperature: float, both_ways: bool, in_parts: InParts = WHOLE, first_dims: Sequence[int] = ()) -> None:
        """both_ways: half of the loss is of positives, which are to find their anchors.  in_parts: makes the vectors of a batch.
        first_dims: vectors of their first so many numbers count as much as whole ones."""
        self._among, self._temperature, self._both_ways = among, temperature, both_ways
        self._in_parts, self._first_dims = in_parts, first_dims

    def labels(self, batch: Batch) -> Tensor:
        """(groups, among): of each anchor its number."""
        places = self.places(batch)
        return places[places != IGNORED].unflatten(0, (-1, self._among))

    def places(self, batch: Batch) -> Tensor:
        return super().labels(batch)

    def __call__(self, model: LM, batch: Batch) -> LossSums:
        return self.closely(model, batch)[0]

    def closely(self, model: LM, batch: Batch) -> tuple[LossSums, Tensor]:
        labels = self.places(batch)
        n = batch.n_labels(labels)
        n = int((labels != IGNORED).sum()) if n is None else n
        first = labelled_first(labels.flatten())[:n] // labels.shape[1]  # (n,) rows of anchors
        vectors, aux = self._in_parts(model, batch)  # (b, d)
        wrong = _apart(labels, batch.tokens)
        with without_autocast(vectors.device):  # cosines are divided by so little that bf16 is too coarse
            found = [self._compared(each, first, wrong) for each in (vectors, *(first_of(vectors, d) for d in self._first_dims))]
        (whole, guesses), *shorter = found
        total = torch.stack([sums.total for sums, _ in found]).mean()
        nats = torch.stack([each[:, 0] for _, each in found]).mean(0)
        told = {f"accuracy_{d}d": sums.metrics["accuracy"] for d, (sums, _) in zip(self._first_dims, shorter, strict=True)}
        sums = aux.beside(LossSums(total, total.detach(), metrics=whole.metrics | told))
        return sums, torch.cat([nats.unsqueeze(-1), guesses[:, 1:]], -1)

    def _compared(self, vectors: Tensor, first: Tensor, wrong: Tensor) -> tuple[LossSums, Tensor]:
        """vectors: (b, d); first: (n,) rows of anchors; wrong: as of `_apart`."""
        n, second = len(first), first + self._among
        seconds = torch.ones_like(wrong[0]).index_fill(0, first, False)  # (b,) whether a row is a candidate of anchors
        cosines = vectors[first] @ vectors.T  # (n, b)
        logits = self._logits(cosines, second, wrong[second] | ~seconds)
        nats = F.cross_entropy(logits, second, reduction="none")  # (n,)
        total = nats.sum()
        if self._both_ways:
            back = self._logits(vectors[second] @ vectors.T, first, wrong[first] | seconds)
            total = (total + F.cross_entropy(back, first, reduction="sum")) / 2
        chances = logits.detach().softmax(-1).max(-1)
        right = (chances.indices == second).to(nats.dtype)
        metrics = with_error({"accuracy": mean_of(right.sum(), n)})
        metrics["similarity"] = mean_of(cosines.detach().gather(1, second.unsqueeze(-1)).sum(), n)
        return LossSums(total, total.detach(), metrics=metrics), torch.stack([nats, chances.values, right], -1)

    def _logits(self, cosines: Tensor, own: Tensor, wrong: Tensor) -> Tensor:
        """(n, b) cosines over the temperature, -inf where a row is no candidate.  own: (n,) each one's counterpart, which always is one."""
        return (cosines / self._temperature).masked_fill(wrong.scatter(1, own.unsqueeze(-1), False), -torch.inf)


def _apart(labels: Tensor, tokens: Tensor) -> Tensor:
    """(b, b) whether two rows are of different groups, or the same text.

    labels: (b, s), which count from 0 in each group; tokens: (b, s).
    """
    group = (labels == 0).any(-1).cumsum(0)
    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * _ODD
    text = (tokens * (places ^ (places >> 29)) * _ODD).sum(-1)  # a hash, modulo 2^64
    return (group.unsqueeze(-1) != group) | (text.unsqueeze(-1) == text)


_ODD = 0x1E3779B97F4A7C15  # of splitmix64 (Steele et al. 2014), as a positive number
