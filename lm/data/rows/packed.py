"""The base of rows that hold documents side by side."""

from lm.data.layout.windows import Packing
from lm.data.rows.base import Rows
from lm.data.tokenizer.tokenizer import Tokenizer


class PackedRows(Rows):
    """Base of rows that hold documents laid by a packing, all of one width."""

    def __init__(self, packing: Packing, tokenizer: Tokenizer, seed: int = 0) -> None:
        self.packing, self.pad, self.seed, self.store = packing, tokenizer.pad, seed, packing.store
        self.n_labels = self.store.n_tokens
        self.bytes_per_label = self.store.n_bytes / self.n_labels

    def __len__(self) -> int:
        return len(self.packing)

    def describe(self) -> str:
        return self.packing.describe()
