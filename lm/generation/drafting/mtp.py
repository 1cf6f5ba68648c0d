"""Drafts by the model's own blocks for multi-token prediction (model.mtp).  DeepSeek-V3, arXiv:2412.19437, section 2.2."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.drafting.base import UNDRAFTED, Drafter, draw_on
from lm.generation.prefill import left_padded, right_padded
from lm.generation.sampling import History
from lm.nn.batch import Batch
from lm.nn.transformer import LM, DecoderLM
from lm.ops.cache.cache import Cache


class MTP(Drafter):
    """Block k drafts the k-th token behind the newest one, from the output of block k - 1 at each place (k = 1: the model's hidden state)
    and the token k places later."""

    def __init__(self, n_tokens: int, model: LM) -> None:
        """Raises ConfigError where the model has no such blocks."""
        if not isinstance(model, DecoderLM) or not model.mtp:
            raise ConfigError("draft=mtp: the model has no blocks that predict further tokens. Use lookup=3, or draft=FOLDER.")
        super().__init__(min(n_tokens, len(model.mtp)))
        self.model = model

    def begin(self, rows: Sequence[History], cfg: SamplingConfig, n_tokens: int, n_new: int, hidden: Tensor, positions: Tensor) -> None:
        self.cfg, self.n_drawn = cfg, n_tokens
        first = len(self.model.blocks)
        b, length, slack = len(rows), max(len(row.begin) for row in rows) + n_new + self.n_tokens, 2 * self.n_tokens + UNDRAFTED + 2
        self.caches = [self._cache(layer, b, length, slack) for layer in range(first, first + self.n_tokens)]
        self.hidden = hidden.new_zeros(self.n_tokens + 1, b, hidden.shape[1], hidden.shape[2])  # the output of each block at each place
        self._keep(0, hidden, positions)
        for k in range(1, self.n_tokens + 1):
            texts = [row.begin[k:] for row in rows]
            ids, at = left_padded(texts, 0, hidden.device)
            if ids.shape[1]:
                self._through(k, ids, at)
        self.done = [[max(0, len(row.begin) - k) for row in rows] for k in range(1, self.n_tokens + 1)]  # places in each cache

    def see(self, hidden: Tensor, positions: Tensor) -> None:
        self._keep(0, hidden, positions)

    def propose(self, rows: Sequence[History]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in rows]
        for k, (cache, done) in enumerate(zip(self.caches, self.done, strict=True), 1):
            texts = [row.begin + row.new + draft for row, draft in zip(rows, drafts, strict=True)]
            ids, at = right_padded([text[n + k :] for text, n in zip(texts, done, strict=True)], done, 0, self.hidden.device)
            made = self._through(k, ids, at)
            ends = [len(text) - k - n for text, n in zip(texts, done, strict=True)]  # places that were read of each row
            logits = self.model.head(made[torch.arange(len(rows)), torch.tensor(ends, device=ids.device) - 1])[:, : self.n_drawn]
            draw_on(drafts, logits, rows, self.cfg)
            self.done[k - 1] = [max(n, len(text) - 2 * k + 1) for text, n in zip(texts, done, strict=True)]  # those before a drafted token
            cache.rewind([n + ids.shape[1] - left for n, left in zip(done, self.done[k - 1], strict=True)])
        return drafts

    def reorder(self, kept: Tensor) -> None:
        self.hidden = self.hidden.index_select(1, kept)
        self.done = [[done[row] for row in kept.tolist()] for done in self.done]
        for cache in self.caches:
            cache.reorder(kept)

    def _cache(self, layer: int, batch: int, max_len: int, slack: int) -> Cache:
        """Returns the cache of one block.  layer: its number, counted on from the model's last block."""
        model, weight = self.model, self.model.embed.weight
        states = model.cfg.parts(layer).mixer.states(model.cfg.d_model, layer)
        return Cache([states], batch, max_len, weight, slack, model.max_seq_len, layer)

    def _keep(self, k: int, hidden: Tensor, positions: Tensor) -> None:
        rows, columns = (positions >= 0).nonzero(as_tuple=True)
        if (beyond := int(positions.max()) + 1 - self.hidden.shape[2]) > 0:
            self.hidden = F.pad(self.hidden, (0, 0, 0, max(beyond, self.hidden.shape[2])))
        self.hidden[k, rows, positions[rows, columns]] = hidden[rows, columns]

    def _through(self, k: int, later: Tensor, positions: Tensor) -> Tensor:
        """Returns the output of block k at these positions, (b, s, d), and keeps it for the next block.  later: the tokens k places later,
        (b, s)."""
        rows = torch.arange(len(later), device=later.device).unsqueeze(1)
        hidden = self.hidden[k - 1, rows, positions.clamp(min=0)]
        ctx = self.model.context(Batch(later, positions=positions), self.caches[k - 1])
        self.caches[k - 1].begin(positions)
        made: Tensor = self.model.mtp[k - 1](hidden, self.model.embed(later) * self.model.embed_scale, ctx)
        self._keep(k, made, positions)
        return made
