"""The one input type of every model and objective. It lives beside the models, since lm/nn imports nothing above itself."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.errors import ConfigError, expect
from lm.ops.ranks.ulysses import UNSHARDED, RowSharding, ShardedRows

AskedAs = Literal["text", "prefix", "source", "spans", "modes"]
"""What a prompt is to a model, as its objective has it: a text to go on with; one that is seen from all sides (prefix); a source, which is
answered; a text whose gaps have sentinels, in a decoder seen from all sides (spans); the same, behind the token of a mode (UL2)."""
IGNORED = -100  # the label of a place where nothing is predicted; no other label is negative


@dataclass
class Batch:
    """Rows of tokens. Where `documents` and `positions` are None, each row is one document at positions 0..s-1, which fast paths use.

    An encoder-decoder reads `source_tokens` in its encoder and `tokens` in its decoder. Which token sees which follows from positions,
    documents and prefix, which every backend knows; any other mask is `Mask.explicit`, for code that calls blocks with a Context of its
    own. Where ranks shard rows, tokens, labels, answers, segments and shares are those of this rank's shard, and positions, documents
    and prefix are those of whole rows.
    """

    tokens: Tensor  # (b, s) int64
    labels: Tensor | None = None  # (b, s) int64, the token to predict at each place, IGNORED where none
    positions: Tensor | None = None  # (b, s) int64, restarting per document; -1 marks padding
    documents: Tensor | None = None  # (b, s) int32, tokens see only their own document
    step_tokens: int = 0  # label tokens of this rank's rows in the whole optimizer step; of rows in slices, the first rank counts all
    source_tokens: Tensor | None = None  # (b, m) int64
    source_positions: Tensor | None = None  # (b, m) int64, -1 marks padding; None: 0..m-1
    source_documents: Tensor | None = None  # (b, m) int32, decoder tokens see the source of their own document
    prefix: Tensor | None = None  # (b, s) bool, tokens that all of their document may see (prefix LM)
    answers: Tensor | None = None  # (b, s) int64, the labels that are answers, where other tokens have labels too; IGNORED elsewhere
    shares: Tensor | None = None  # (b, s) float32, what each label counts in the loss and its measure; None: 1
    padded: bool = True  # positions may be -1; False: none is, so that code that handles padding is skipped
    segments: Tensor | None = None  # (b, s) int64, which of several texts a token belongs to (BERT); None: all 0
    targets: Tensor | None = None  # (b, m, k) float32, the numbers to tell at each of up to m labels of a row; None: labels are all
    sharding: RowSharding = field(default_factory=lambda: UNSHARDED)  # whether ranks share the rows, and how
    lengths: list[int] | None = None  # tokens of each row of one text; None: not counted, and a GPU would have to be waited for
    beside: "list[Batch]" = field(default_factory=list)  # what a loss reads before a step's first rows; `_counted` in lm/data/loader.py
    counted: tuple[Tensor, int] | None = None  # labels that `to` has copied from a CPU, and how many of them count

    @classmethod
    def of(cls, given: "Batch | Tensor") -> "Batch":
        """Returns a batch of these tokens; a batch as it is. Raises ConfigError for all else, and for tokens that are no whole numbers."""
        if isinstance(given, Tensor):
            if given.ndim != 2:
                found, remedy = tuple(given.shape), "Give token ids of shape (rows, tokens): of one row ids.unsqueeze(0)"
                raise ConfigError(f"batch: a tensor of shape {found} was given. {remedy}.")
            given = cls(given)
        expect("batch", given, cls, "Give a Batch, or a tensor of token ids of shape (rows, tokens)")
        if given.tokens.dtype not in (torch.int64, torch.int32):
            raise ConfigError(f"batch: tokens of {given.tokens.dtype} were given, and ids are int64 or int32. Give ids.long().")
        return given

    def require(self, cached: int | None) -> None:
        """Raises ValueError for fields that contradict each other or the cache.  cached: tokens that the cache holds; None: no cache."""
        if cached is not None and self.documents is not None:
            raise ValueError("a cache holds one document a row, and batch.documents was given. Leave it out, or decode without a cache.")
        if cached and self.prefix is not None:
            raise ValueError("batch.prefix was given to a cache that holds tokens already, which cannot see it. Give it with the first.")
        if self.documents is not None and self.positions is None:
            raise ValueError("batch.documents was given without batch.positions, which restart in each document. Give both.")
        if self.source_tokens is not None and (self.documents is None) != (self.source_documents is None):
            raise ValueError("of batch.documents and batch.source_documents one is None. Give both, or neither.")
        if self.source_documents is not None and self.source_positions is None:
            raise ValueError("batch.source_documents was given without batch.source_positions. Give both.")

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device, copied without waiting where its memory is pinned."""
        cuda = torch.device(device).type == "cuda"  # a Mac's copy would be read too early
        moved = self._each(lambda x: x.to(device, non_blocking=cuda))
        moved.beside = [each.to(device) for each in self.beside]
        if self.labels is not None and moved.labels is not None and self.labels.is_cpu and not moved.labels.is_cpu:
            moved.counted = moved.labels, int(((self.labels != IGNORED) if self.shares is None else self.shares != 0).sum())
        return moved

    @property
    def row_len(self) -> int:
        """Tokens of a whole row, of which this rank may have a shard."""
        return self.sharding.row_len(self.tokens.shape[1])

    def n_labels(self, labels: Tensor) -> int | None:
        """Returns how many of the labels count, where that is known without waiting for a GPU."""
        return self.counted[1] if self.counted is not None and self.counted[0] is labels else None

    def pin_memory(self) -> "Batch":
        """The same batch in pinned memory, which a GPU copies by itself. Torch's loaders call it by this name."""
        return replace(self._each(Tensor.pin_memory), beside=[each.pin_memory() for each in self.beside])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: change(value) for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **changed)

    def picked(self, rows: Tensor) -> "Batch":
        """Returns these of the rows.  rows: (b,) bool, or indices."""
        return replace(self._each(lambda x: x[rows]), lengths=None)

    def sharded(self, sharding: ShardedRows) -> "Batch":
        """Returns this rank's shard of whole rows, which are padded at their ends so that shards are of equal length. The first rank has
        the `step_tokens` of all."""
        whole = self._wider(-self.tokens.shape[1] % sharding.n)
        mine: dict[str, Any] = {name: sharding.shard(x) for name, x in whole._by_token().items()}
        return replace(whole, **mine, step_tokens=0 if sharding.rank else whole.step_tokens, sharding=sharding)

    def _by_token(self) -> dict[str, Tensor]:
        """Returns the fields of which a rank needs no more than its own tokens'."""
        each = {"tokens": self.tokens, "labels": self.labels, "answers": self.answers, "segments": self.segments, "shares": self.shares}
        return {name: x for name, x in each.items() if x is not None}

    def _wider(self, by: int) -> "Batch":
        """Returns the same rows with `by` places of padding behind them."""
        if not by:
            return self
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        row = {"positions": places if self.positions is None else self.positions, "documents": self.documents, "prefix": self.prefix}
        fill = {"labels": IGNORED, "answers": IGNORED, "positions": -1, "documents": -1}
        shown: dict[str, Tensor] = self._by_token() | {name: x for name, x in row.items() if x is not None}
        wider: dict[str, Any] = {name: F.pad(x, (0, by), value=fill.get(name, 0)) for name, x in shown.items()}
        return replace(self, **wider)
