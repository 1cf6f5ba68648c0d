"""Rows for masked diffusion: a drawn number of tokens is hidden, from one to all, and predicted from those that are left."""

from typing import Literal

import numpy as np
import torch

from lm.data.layout.windows import PADDING, Packing
from lm.data.order import Ids, uniforms
from lm.data.rows.base import LikelihoodConfig, Material, Rows
from lm.data.rows.packed import PackedRows
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch

_TURNS, _GOLDEN = 16, (5**0.5 - 1) / 2


class DiffusionConfig(LikelihoodConfig):
    """Predict hidden tokens, of which there may be one or all, so that text can be written by filling in masks a few at a time. The loss is
    a bound on that of the text.  Nie et al. 2025, arXiv:2502.09992 (LLaDA); Sahoo et al. 2024, arXiv:2406.07524."""

    models = ("encoder",)
    packings = ("split", "fit")

    kind: Literal["diffusion"] = "diffusion"

    def specials(self) -> tuple[str, ...]:
        return ("<|mask|>",)

    def rows(self, of: Material) -> Rows:
        return DiffusionRows(of.packing(ahead=0), of.tokenizer, of.seed)


class DiffusionRows(PackedRows):
    """Of the n tokens of a row, k are replaced by the mask token; k is uniform in 1..n, and any k tokens are as likely as any others. All n
    have labels: a hidden one counts n / k, the others 0. The mean loss is then -log p of the row in an order drawn anew each time, token by
    token, in which the model predicts each one from those before it: a bound on -log p (Nie et al. 2025, equation 14; Uria et al. 2014,
    arXiv:1310.1757). A token that begins documents alone is always shown, and has none.

    From the first row to the last one k goes through 1..n sixteen times, each time from another place on: those of evenly spaced rows, as
    of a validation, are spread over 1..n, however many they are, and their mean is less a matter of chance.
    """

    def __init__(self, packing: Packing, tokenizer: Tokenizer, seed: int) -> None:
        if tokenizer.mask is None:
            raise ConfigError(
                "objective=diffusion: the tokenizer has no mask token (<|mask|>, [MASK] or <mask>). Add one by tokenizer.specials."
            )
        super().__init__(packing, tokenizer, seed)
        self._mask, self._begins = tokenizer.mask, [token for token in tokenizer.prefix if token not in tokenizer.suffix]
        self.n_labels = max(1, self.store.n_tokens - self.store.n_documents * len(self._begins))
        self.bytes_per_label = self.store.n_bytes / self.n_labels

    def documents(self, ids: Ids) -> Ids:
        return self.packing.documents(ids)

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        packed = self.packing.read(ids)
        tokens = packed.tokens
        chance = uniforms(self.seed, draw, ids, tokens.shape[1])
        turns = ids[:, None] * _TURNS / len(self)
        level = (uniforms(self.seed, draw, np.array([-1]), 1) + turns + np.floor(turns) * _GOLDEN) % 1  # (b, 1)
        known = (tokens != PADDING) & ~np.isin(tokens, self._begins)
        n = known.sum(1, keepdims=True)
        k = 1 + (level * n).astype(np.int64)
        hidden = known & (np.where(known, chance, 2).argsort(1).argsort(1) < k)
        packed.tokens = np.where(hidden, self._mask, tokens)
        labels, shares = np.where(known, tokens, IGNORED), np.where(hidden, n / k, 0).astype(np.float32)
        rows = (packed.padded(self.pad), torch.from_numpy(labels), packed.positions, packed.documents)
        return Batch(*rows, shares=torch.from_numpy(shares))
