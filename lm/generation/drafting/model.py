"""Drafts by a smaller model with the same tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.decode import begin
from lm.generation.drafting.base import Drafter, draw_on
from lm.generation.prefill import prefill, right_padded, uneven
from lm.generation.sampling import History, common
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.ops.cache.cache import Cache
from lm.schema import MOST


class DraftModel(Drafter):
    """Draws from its own logits, with the sampling options and the random numbers that the model draws with."""

    def __init__(self, n_tokens: int, draft: LM, model: LM) -> None:
        """Raises ConfigError where the draft model is of another kind, or has fewer positions than the model may reach."""
        super().__init__(n_tokens)
        self.draft = draft
        if draft.cfg.kind != model.cfg.kind:
            raise ConfigError(f"draft: it is of kind {draft.cfg.kind}, and the model of kind {model.cfg.kind}. Draft with one of its kind.")
        by_place = draft.cfg.position.by_place
        if by_place and not (model.cfg.position.by_place and model.max_seq_len <= draft.max_seq_len):
            raise ConfigError(
                f"draft: its position={draft.cfg.position.kind} ends after {draft.max_seq_len} tokens, and the model goes further."
                " Draft with a model of a longer context."
            )
        self.last = (draft.max_seq_len if by_place else MOST) - 1  # drafts beyond the model's own last place are cut off

    def begin(self, rows: Sequence[History], cfg: SamplingConfig, n_tokens: int, n_new: int, hidden: Tensor, positions: Tensor) -> None:
        self.cfg, self.n_drawn = cfg, n_tokens
        own = [History(row.key, self._begin(row), source=row.source) for row in rows]
        self.cache: Cache
        self.cache, *_ = prefill(self.draft, own, 0, n_new, cfg.prefill_chunk, ahead=self.n_tokens)
        self.first = [row.begin for row in own]
        self.cached = [list(row.begin) for row in own]  # what the cache holds of each row

    def _begin(self, row: History) -> list[int]:
        """Returns what the drafter reads first: the same, but for its own start token."""
        return [*begin(self.draft, row.source)[:1], *row.begin[1:]] if row.source else row.begin

    def propose(self, rows: Sequence[History]) -> list[list[int]]:
        texts = [first + row.new for first, row in zip(self.first, rows, strict=True)]
        kept = [common(tokens, text[:-1]) for tokens, text in zip(self.cached, texts, strict=True)]
        self.cache.rewind([len(tokens) - n for tokens, n in zip(self.cached, kept, strict=True)])
        unread = [text[n:] for text, n in zip(texts, kept, strict=True)]
        logits = self._read(unread, kept)  # (b, v)
        drafts: list[list[int]] = [[] for _ in rows]
        for step in range(self.n_tokens):
            if step:
                logits = self._read([draft[-1:] for draft in drafts], [len(text) + step - 1 for text in texts])
            draw_on(drafts, logits, rows, self.cfg)
        self.cached = [text + draft[:-1] for text, draft in zip(texts, drafts, strict=True)]
        return drafts

    def reorder(self, kept: Tensor) -> None:
        self.cache.reorder(kept)
        self.first, self.cached = ([tokens[row] for row in kept.tolist()] for tokens in (self.first, self.cached))

    def _read(self, tokens: Sequence[list[int]], starts: Sequence[int]) -> Tensor:
        """Reads the tokens of each row at positions from starts[i] on; returns the logits behind the row's last one, (b, v)."""
        ids, positions = right_padded(tokens, starts, 0, self.draft.embed.weight.device)
        batch = Batch(ids, positions=positions.clamp(max=self.last), padded=uneven(tokens))
        logits: Tensor = self.draft(batch, cache=self.cache)
        n = [len(each) for each in tokens]
        self.cache.rewind([ids.shape[1] - each for each in n])
        return logits[torch.arange(len(n)), torch.tensor(n, device=ids.device) - 1, : self.n_drawn]
