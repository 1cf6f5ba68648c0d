"""The loss of texts that belong together: each is to be more like its own counterpart than like those of others."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.cross_entropy import LossSums, mean_of, with_error
from lm.losses.embeddings import row_vectors
from lm.losses.measure import Measure
from lm.losses.tokens import labelled_first
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM
from lm.ops.precision import without_autocast


class Contrastive(Measure):
    """-log of the softmax over candidates of cosine / temperature, at an anchor's own one, summed over anchors (InfoNCE; van den Oord et
    al. 2018, arXiv:1807.03748, equation 4).

    A batch has groups of rows: `among` anchors, whose labels count from 0, their positives in the same order, and any number of negatives.
    Candidates are the positives and negatives of the same group, but for those that are the same text as the anchor's own one.
    """

    less = ("ece", "error")
    of_text = False
    units = {"loss": "nats/pair", "similarity": "cosine"}

    def __init__(self, among: int, temperature: float, both_ways: bool) -> None:
        """both_ways: half of the loss is of positives, which are to find their anchors."""
        self._among, self._temperature, self._both_ways = among, temperature, both_ways

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
        vectors: Tensor = model(batch, read=row_vectors(batch, model.cfg))  # (b, d)
        with without_autocast(vectors.device):  # cosines are divided by so little that bf16 is too coarse
            return self._compared(vectors, first, first + self._among, _apart(labels, batch.tokens))

    def _compared(self, vectors: Tensor, first: Tensor, second: Tensor, wrong: Tensor) -> tuple[LossSums, Tensor]:
        """vectors: (b, d); first, second: (n,) rows of anchors and of their positives; wrong: as of `_apart`."""
        n = len(first)
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
