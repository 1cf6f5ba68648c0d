"""The loop of decoding: forwards over the newest tokens of rows, and draws, until every row has ended."""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lm.errors import NumericsError
from lm.generation.config import SamplingConfig
from lm.generation.drafting.base import Drafter
from lm.generation.grammar import Grammar, Matcher
from lm.generation.prefill import prefill, right_padded, uneven
from lm.generation.sampling import History, Logprob, choose, logprobs
from lm.nn.batch import Batch
from lm.nn.head import every_position
from lm.nn.transformer import LM

OnToken = Callable[[int, int], bool]


@dataclass
class Row(History):
    """One sample of a prompt with its new tokens.  index: of the row among all rows of a call; limit: how many new tokens it may get."""

    index: int = 0
    limit: int = 0
    logprobs: list[Logprob] = field(default_factory=list)  # one for each new token; empty unless cfg.logprobs asks for them


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that may be drawn, those that end a row or fill it up, and the grammar that a whole row matches."""

    n_tokens: int  # ids from n_tokens on are never drawn: rows of the embedding that the tokenizer does not use
    ends: Collection[int] = ()  # a row ends at one of them, which is not part of it
    pad: int = 0
    grammar: Grammar | None = None  # there just where cfg.form asks for one
    first: int | None = None  # what an encoder-decoder's answer begins with, instead of the model's first_token

    def matcher(self) -> Matcher | None:
        """Returns what follows the grammar through one row."""
        return None if self.grammar is None else self.grammar.matcher()


def goes_ahead(model: LM, cfg: SamplingConfig, drafter: Drafter) -> bool:
    """Returns whether a forward begins before the host knows which tokens it reads: where the device works by itself meanwhile, and the
    host does not choose what is read next."""
    return model.embed.weight.is_cuda and drafter.n_tokens == 0 and cfg.logprobs is None


class Loop:
    """Rows that are decoded together."""

    def __init__(
        self, model: LM, rows: list[Row], cfg: SamplingConfig, vocabulary: Vocabulary, on_token: OnToken | None, drafter: Drafter
    ) -> None:
        self.model, self.rows, self.cfg, self.vocabulary, self.on_token, self.drafter = model, rows, cfg, vocabulary, on_token, drafter
        n_new = max(row.limit for row in rows)
        self.cache, positions, hidden, self.logits = prefill(model, rows, vocabulary.pad, n_new, cfg.prefill_chunk, drafter.n_tokens)
        drafter.begin(rows, cfg, vocabulary.n_tokens, n_new, hidden, positions)
        self.drafts: list[list[int]] = [[] for _ in rows]  # drafted tokens that the last forward read behind each row's newest token

    def run(self) -> None:
        """Decodes until every row has ended."""
        all_rows, tally = self.rows, self.drafter.tally
        self._draw()
        while self.rows:
            begun = time.perf_counter()
            self._forward()
            drafted = any(self.drafts)
            self._draw()
            tally.count(time.perf_counter() - begun, drafted)
        tally.tokens += max(len(row.new) for row in all_rows) - 1

    def _forward(self) -> None:
        """Runs the model over each row's newest token and its draft, which is cut at the row's limit."""
        found = self.drafter.propose(self.rows) if self.drafter.tally.ready else [[]] * len(self.rows)
        self.drafts = [draft[: row.limit - len(row.new) - 1] for draft, row in zip(found, self.rows, strict=True)]
        given = [[row.new[-1], *draft] for row, draft in zip(self.rows, self.drafts, strict=True)]
        starts = [len(row.begin) + len(row.new) - 1 for row in self.rows]
        ids, positions = right_padded(given, starts, self.vocabulary.pad, self.logits.device)
        batch = Batch(ids, positions=positions, padded=uneven(given))
        hidden, self.logits = self.model(batch, read=every_position, cache=self.cache)  # (b, s, v)
        self.drafter.see(hidden, positions)

    def _draw(self) -> None:
        """Draws the model's own token at each place of the drafts. Each row takes them up to and including the first that
        differs from its draft; rejected drafts leave the cache, and so do rows that end."""
        places = [(i, j) for i, draft in enumerate(self.drafts) for j in range(len(draft) + 1)]
        logits = self.logits.squeeze(1)  # (b, 1, v) -> (rows, v)
        if any(self.drafts):
            which, where = torch.tensor(places, device=self.logits.device).unbind(1)
            logits = self.logits[which, where]  # (b, s, v) -> (drafts and rows, v)
        histories = [self.rows[i].extended(self.drafts[i][:j]) for i, j in places]
        ids = choose(finite(logits[:, : self.vocabulary.n_tokens]), histories, self.cfg)
        told = [] if self.cfg.logprobs is None else logprobs(logits, ids, self.cfg.logprobs)
        going, forgotten, first, drawn = [], [], 0, ids.tolist()
        for i, (row, draft) in enumerate(zip(self.rows, self.drafts, strict=True)):
            mine = slice(first, first := first + len(draft) + 1)
            n, goes_on = self._take(row, draft, drawn[mine], told[mine])
            self.drafter.tally.accept(len(draft), n - 1)
            forgotten.append(self.logits.shape[1] - n if goes_on else 0)
            going += [i] if goes_on else []
        if any(forgotten):
            self.cache.rewind(forgotten)
        self._keep(going)

    def _keep(self, going: list[int]) -> None:
        """Leaves only these rows."""
        if len(going) < len(self.rows):
            kept = torch.tensor(going, dtype=torch.int64, device=self.logits.device)
            self.rows = [self.rows[i] for i in going]
            self.cache.reorder(kept)
            self.drafter.reorder(kept)

    def _take(self, row: Row, draft: list[int], drawn: list[int], told: list[Logprob]) -> tuple[int, bool]:
        """Appends drawn tokens to the row, up to and including the first that differs from the draft. Returns how many the row took, one
        more than the draft's accepted tokens, and whether it goes on."""
        for n, token in enumerate(drawn, 1):
            if not self._goes_on(row, token, told[n - 1 : n]):
                return n, False
            if n > len(draft) or token != draft[n - 1]:
                break
        return n, True

    def _goes_on(self, row: Row, token: int, told: list[Logprob]) -> bool:
        if token in self.vocabulary.ends:
            return False
        row.new.append(token)
        row.logprobs += told
        ended = self.on_token is not None and self.on_token(row.index, token)
        return not ended and len(row.new) < row.limit


class Ahead(Loop):
    """Without drafts: each forward begins before the host has read which tokens it is over, so that the device waits for no host. A row
    that turns out to have ended is dropped behind that forward."""

    def run(self) -> None:
        at = torch.tensor([[len(row.begin) - 1] for row in self.rows], device=self.logits.device)
        places = self.model.max_seq_len if self.model.cfg.position.by_place else None
        while self.rows:
            logits = self.logits.squeeze(1)[:, : self.vocabulary.n_tokens]
            ids = choose(logits, self.rows, self.cfg).clamp(max=self.vocabulary.n_tokens - 1)  # of logits that are no numbers
            coming = Coming(ids, total(logits))
            if any(len(row.new) + 1 < row.limit for row in self.rows):
                at = at + 1 if places is None else (at + 1).clamp(max=places - 1)  # of a row that has no place left, and ends
                self.logits = self.model(Batch(ids.unsqueeze(1), positions=at, padded=False), cache=self.cache)
            drawn, summed = coming.here()
            if not math.isfinite(summed):
                finite(logits)
            going = [i for i, (row, token) in enumerate(zip(self.rows, drawn, strict=True)) if self._goes_on(row, token, [])]
            if len(going) < len(self.rows):
                at, self.logits = at[going], self.logits[going]
            self._keep(going)


class Coming:
    """Numbers on their way from a device to the host."""

    def __init__(self, *numbers: Tensor) -> None:
        self._held = [each.to("cpu", non_blocking=True) for each in numbers]
        self._sent = torch.cuda.Event() if numbers[0].is_cuda else None
        if self._sent is not None:
            self._sent.record()

    def here(self) -> list[Any]:
        """Waits for them, and not for what the device was told to do behind."""
        if self._sent is not None:
            self._sent.synchronize()
        return [each.tolist() for each in self._held]


def finite(logits: Tensor) -> Tensor:
    """Returns the logits. Raises NumericsError where one is NaN or infinite. Their sum tells at a twentieth of the cost; only where it is
    not finite, which finite logits can cause too, each logit is checked."""
    if not math.isfinite(total(logits)) and not torch.isfinite(logits).all():
        raise NumericsError("generate: the model's logits hold NaN or infinity, and no token can be drawn. Use another checkpoint.")
    return logits


def total(logits: Tensor) -> Tensor:
    """Returns their sum in float32."""
    return logits.sum(dtype=torch.float32)
