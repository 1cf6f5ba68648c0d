"""The one input type of every model and objective. It lives beside the models, since lm/nn imports nothing above itself."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # a label that is not predicted


@dataclass
class Batch:
    """Rows of tokens. `documents` None means that each row is one document at positions 0..s-1, which fast paths use.

    An encoder-decoder reads `source_tokens` in its encoder and `tokens` in its decoder. Who sees whom follows from positions, documents
    and prefix, which every backend knows; any other mask is `Mask.explicit`, for code that calls blocks with a Context of its own.
    """

    tokens: Tensor  # (b, s) int64
    labels: Tensor | None = None  # (b, s) int64, the token to predict at each place, IGNORED where none
    positions: Tensor | None = None  # (b, s) int64, restarting per document; -1 marks padding
    documents: Tensor | None = None  # (b, s) int32, tokens see only their own document
    step_tokens: int = 0  # label tokens of this rank's rows in the whole optimizer step
    source_tokens: Tensor | None = None  # (b, m) int64
    source_positions: Tensor | None = None  # (b, m) int64, -1 marks padding; None: 0..m-1
    source_documents: Tensor | None = None  # (b, m) int32, decoder tokens see the source of their own document
    prefix: Tensor | None = None  # (b, s) bool, tokens that all of their document may see (prefix LM)
    answers: Tensor | None = None  # (b, s) int64, the labels that are answers, where others are too; IGNORED elsewhere
    padded: bool = True  # positions may be -1; False: none is, and what looks for padding is left out
    segments: Tensor | None = None  # (b, s) int64, which of several texts a token belongs to (BERT); None: all 0

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device, copied without waiting."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **moved)
