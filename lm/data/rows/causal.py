"""Rows for next-token prediction."""

from typing import Literal

import torch

from lm.data.layout.windows import Packing, Windows
from lm.data.order import Ids
from lm.data.rows.base import Material, Rows
from lm.data.rows.packed import PackedRows
from lm.data.rows.scheduled import ScheduledSamplingConfig
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.batch import Batch


class CausalConfig(ScheduledSamplingConfig):
    """Predict the next token."""

    usual_for = ("decoder",)
    packings = ("split", "fit")

    kind: Literal["causal"] = "causal"

    def rows(self, of: Material) -> Rows:
        return CausalRows(of.store, of.tokenizer, of.data.seq_len, of.data.mask_documents, of.packing(ahead=1))


class CausalRows(PackedRows):
    """Each token of a row is labelled with the next token, or IGNORED where the next token begins another document."""

    def __init__(self, store: TokenStore, tokenizer: Tokenizer, seq_len: int, mask_documents: bool, packing: Packing | None = None) -> None:
        """packing: how documents are laid into rows. None: windows of seq_len tokens."""
        super().__init__(packing or Windows(store, seq_len, mask_documents, ahead=1), tokenizer)
        self._mask_documents = mask_documents
        self.n_labels = max(1, store.n_tokens - store.n_documents)
        self.bytes_per_label = store.n_bytes / self.n_labels

    def documents(self, ids: Ids) -> Ids:
        return self.packing.documents(ids)

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """Nothing is random here. With mask_documents off the padding needs no mask: it comes after all predicted tokens."""
        packed = self.packing.read(ids)
        documents, positions = (packed.documents, packed.positions) if self._mask_documents else (None, None)
        return Batch(packed.padded(self.pad), torch.from_numpy(packed.following), positions, documents)
