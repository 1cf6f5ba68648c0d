"""One vector for each text of a batch, as which it is compared with others."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses.auxiliary import Auxiliary, with_auxiliary
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.head import Head, Reader
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import LM
from lm.ops.precision import wide_dtype
from lm.ops.recompute import Recomputed, recomputed

_ROUND = 8  # so that compiled models meet fewer different widths


def row_vectors(batch: Batch, model: ModelConfig) -> Reader:
    """A reader: (b, d) what the head would read of each row, a text, in float32 or wider and of length 1: at the first token of an encoder
    and the last one of a decoder, or the mean over all tokens, as model.head.pooling says.

    batch: with a text in each row, padded on the right, and its positions.
    """
    assert batch.positions is not None
    b = len(batch.tokens)
    at = batch.positions.new_zeros(b) if model.kind == "encoder" else batch.positions.argmax(-1)

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        vectors = hidden[torch.arange(b, device=at.device), at]  # (b, s, d) -> (b, d)
        return F.normalize(vectors.to(wide_dtype(vectors)), dim=-1)

    return read


def first_of(vectors: Tensor, d: int) -> Tensor:
    """(b, d) the first numbers of vectors, made to length 1."""
    return F.normalize(vectors[:, :d], dim=-1)


@dataclass(frozen=True)
class InParts:
    """The vectors of a batch, (b, d) as of `row_vectors`, whose texts a model reads in so many parts of like lengths: each is as wide as
    its longest text, so that questions are not padded to the lengths of answers. Ranks that share weights read equally many parts.

    again: the backward reads each part once more, and its activations are held no longer.
    """

    n: int = 1
    again: bool = False

    def __call__(self, model: LM, batch: Batch) -> tuple[Tensor, Auxiliary]:
        """Returns the vectors, and what layers add to a loss of pairs, in which a text counts as half a unit."""

        def vectors(fields: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
            part = Batch(**fields)
            found, aux = model(part, read=with_auxiliary(row_vectors(part, model.cfg), 1 / 2))
            return found, aux.losses, aux.loads

        assert batch.positions is not None
        lengths = (batch.positions >= 0).sum(-1).tolist() if batch.lengths is None else batch.lengths
        order, device = sorted(range(len(lengths)), key=lengths.__getitem__), batch.tokens.device
        rows = torch.tensor(order).to(device, non_blocking=device.type == "cuda")  # no host sync
        ends = [len(order) * (i + 1) // self.n for i in range(self.n)]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        parts = [_narrowed(batch, some, lengths[order[end - 1]]) for some, end in zip(rows.split(sizes), ends, strict=True)]
        what: Recomputed = "block" if self.again and torch.is_grad_enabled() else "none"
        found, losses, loads = zip(*(recomputed(vectors, what, part) for part in parts), strict=True)
        total = {name: torch.stack([part[name] for part in losses]).sum(0) for name in losses[0]}
        there = [part for part in loads if part is not None]
        return torch.cat(found)[rows.argsort()], Auxiliary(total, torch.stack(there).sum(0) if there else None)


WHOLE = InParts()


def _narrowed(batch: Batch, rows: Tensor, longest: int) -> dict[str, Tensor]:
    """Returns the fields of a batch of these rows, as wide as the longest of them."""
    width = -(-longest // _ROUND) * _ROUND
    given = {name: getattr(batch, name) for name in ("tokens", "positions", "documents", "segments")}
    return {name: field[rows, :width] for name, field in given.items() if field is not None}
