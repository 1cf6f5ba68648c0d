"""What embedding and loss compute over a vocabulary, of which each of several ranks may hold a slice.

Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from lm.errors import ConfigError
from lm.ops.ranks.tensor_parallel import TensorParallel
from lm.ops.ranks.ulysses import UNSHARDED, RowSharding, reduced


class Vocabulary:
    """The whole vocabulary on this rank, so that nothing is exchanged. The base class of other ways; logits are (n, v)."""

    ranks = 1
    """How many have a slice of it each."""

    def size(self, logits: Tensor) -> int:
        """Returns how many entries the vocabulary has."""
        return logits.shape[-1]

    def embedded(self, weight: Tensor, tokens: Tensor, sharding: RowSharding) -> Tensor:
        """Returns the embeddings of the tokens, (b, s, d).  sharding: how ranks share the rows of the batch."""
        try:
            return F.embedding(tokens, weight)
        except IndexError:
            wrong = tokens[(tokens < 0) | (tokens >= len(weight))][0]
            rule = f"token {int(wrong)} is not below vocab_size={len(weight)}" if wrong >= 0 else f"token {int(wrong)} is negative"
            raise ConfigError(f"batch: {rule}. Give ids of the model's own tokenizer.") from None

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns x for the tokens of all ranks, given x for this rank's tokens, (n/ranks, ...) -> (n, ...)."""
        return x

    def own(self, x: Tensor) -> Tensor:
        """Returns x for this rank's tokens, given x for the tokens of all ranks, (n, ...) -> (n/ranks, ...)."""
        return x

    def summed(self, x: Tensor) -> Tensor:
        """Returns the sum over the whole vocabulary, given the sum over this rank's entries."""
        return x

    def places(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns, (n, 1) each, the index of each label among this rank's logits, and 1.0 if it is there or 0.0 if not; an ignored
        label, which is negative, is not."""
        return labels.clamp(min=0).unsqueeze(-1), (labels >= 0).float().unsqueeze(-1)

    def log_z(self, logits: Tensor) -> Tensor:
        """Returns (n, 1) the logarithm of the sum over the vocabulary of exp(logit)."""
        return logits.logsumexp(-1, keepdim=True)

    def log_softmax_(self, logits: Tensor) -> Tensor:
        """Returns log p of this rank's entries, without a gradient. The logits, in float32 or wider, are lost: a CPU writes over them."""
        return torch.log_softmax(logits, -1, out=logits) if logits.is_cpu else F.log_softmax(logits, -1)

    def likeliest(self, logits: Tensor) -> Tensor:
        """Returns the likeliest token of each row of logits, (n,)."""
        return logits.argmax(-1)

    def whole(self, logits: Tensor) -> Tensor:
        """Returns the logits of the whole vocabulary, where all ranks have the same tokens."""
        return logits


class VocabularySlice(Vocabulary):
    """This rank holds entries start .. stop - 1, and the other ranks the others; all ranks make each call, in the same order."""

    def __init__(self, tensor_parallel: TensorParallel, size: int) -> None:
        self._tensor_parallel, self._size, part, self.ranks = tensor_parallel, size, tensor_parallel.part(size), tensor_parallel.n
        self._start, self._stop = part.start, part.stop

    def size(self, logits: Tensor) -> int:
        return self._size

    def embedded(self, weight: Tensor, tokens: Tensor, sharding: RowSharding) -> Tensor:
        tokens = tokens if sharding is UNSHARDED else self._tensor_parallel.all_gather(tokens)  # (b, s) -> (b, n*s)
        at, here = self._inside(tokens)
        found = F.embedding(at, weight) * here.unsqueeze(-1)
        return self._reduced(found) if sharding is UNSHARDED else self._tensor_parallel.reduce_scatter(found)  # (b, n*s, d) -> (b, s, d)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._tensor_parallel.all_gather(x.unsqueeze(0)).squeeze(0)

    def own(self, x: Tensor) -> Tensor:
        return x.chunk(self._tensor_parallel.n)[self._tensor_parallel.rank]

    def summed(self, x: Tensor) -> Tensor:
        return self._reduced(x)

    def places(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        at, here = self._inside(labels)
        return at.unsqueeze(-1), here.float().unsqueeze(-1)

    def log_z(self, logits: Tensor) -> Tensor:
        highest = self._reduced(logits.amax(-1, keepdim=True), distributed.ReduceOp.MAX)
        return highest + self._reduced((logits - highest).exp_().sum(-1, keepdim=True)).log()

    def log_softmax_(self, logits: Tensor) -> Tensor:
        return logits.sub_(self.log_z(logits))

    def likeliest(self, logits: Tensor) -> Tensor:
        mine = logits.max(-1)
        highest = self._reduced(mine.values, distributed.ReduceOp.MAX)
        first = (mine.indices + self._start).masked_fill(mine.values < highest, self._size)
        return self._reduced(first, distributed.ReduceOp.MIN)

    def whole(self, logits: Tensor) -> Tensor:
        """Has no gradient, since training reads slices of logits. Raises ConfigError where logits need one."""
        if logits.requires_grad:
            raise ConfigError("launch.tensor: this loss reads whole logits, of which each rank has a slice. Use"
                              " lm.losses.tokens.chunked_loss, or set launch.tensor=1.")  # fmt: skip
        shown = logits.new_zeros(*logits.shape[:-1], self._size)
        shown[..., self._start : self._stop] = logits
        return self._reduced(shown)

    def _inside(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the index of each token within the slice, and whether it is in the slice."""
        here = (tokens >= self._start) & (tokens < self._stop)
        return torch.where(here, tokens - self._start, 0), here

    def _reduced(self, x: Tensor, by: Any = distributed.ReduceOp.SUM) -> Tensor:
        return reduced(x, self._tensor_parallel.group, by)
