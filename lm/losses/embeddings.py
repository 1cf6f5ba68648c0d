"""One vector for each text of a batch, as which it is compared with others."""

import torch
from torch import Tensor

from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.head import Head, Reader
from lm.nn.stack import ModelConfig
from lm.ops.precision import wide_dtype


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
        return torch.nn.functional.normalize(vectors.to(wide_dtype(vectors)), dim=-1)

    return read
