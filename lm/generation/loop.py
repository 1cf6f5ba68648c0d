"""The loop of decoding: forwards over the newest tokens of rows, and draws, until every row has ended."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lm.errors import NumericsError
from lm.generation.config import SamplingConfig
from lm.generation.drafting.base import Drafter
from lm.generation.grammar import Grammar, Matcher
from lm.generation.prefill import new_cache, prefill, right_padded, uneven
from lm.generation.sampling import History, Logprob, choose, logprobs
from lm.nn.batch import Batch
from lm.nn.head import every_position
from lm.nn.transformer import LM
from lm.ops.cache.cache import Cache

ROWS, TOKENS = 32, 8192  # decoded together at the most: so many rows, or of short ones about as long, more, up to so many tokens

OnToken = Callable[[int, int], bool]
OnEnd = Callable[["Row"], None]


@dataclass
class Row(History):
    """One sample of a prompt with its new tokens.  index: of the row among all rows of a call; limit: how many new tokens it may get."""

    index: int = 0
    limit: int = 0
    logprobs: list[Logprob] = field(default_factory=list)  # one for each new token; empty unless cfg.logprobs asks for them

    @property
    def position(self) -> int:
        """Returns the position of its newest token: as many are before it, which a cache holds when that is read."""
        return len(self.begin) + len(self.new) - 1


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
    """Rows that are decoded together, as many as there are places: others take those of rows that have ended, once half of them are free,
    or with a drafter, which begins anew for each batch, all of them."""

    def __init__(
        self,
        model: LM,
        rows: Sequence[Row],
        cfg: SamplingConfig,
        vocabulary: Vocabulary,
        drafter: Drafter,
        on_token: OnToken | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        self.model, self.cfg, self.vocabulary, self.drafter = model, cfg, vocabulary, drafter
        self.on_token, self.on_end = on_token, on_end
        self.all, self.waiting, self.rows = rows, deque(rows), list[Row]()
        self.cache: Cache  # from the first rows on, and so are these two
        self.logits: Tensor
        self.drafts: list[list[int]]  # drafted tokens that the last forward read behind each row's newest token
        lengths = [len(row.source) + len(row.begin) + row.limit for row in rows]
        alike = bool(rows) and 4 * min(lengths) >= 3 * max(lengths)  # a short row beside a long one takes the time of that
        self.places = max(ROWS, TOKENS // max(lengths)) if alike else ROWS
        self.most_left = 0 if drafter.n_tokens else self.places // 2  # rows that go on beside others that join

    def run(self) -> None:
        """Decodes until every row has ended."""
        tally = self.drafter.tally
        while self.waiting or self.rows:
            begun, goes_on = time.perf_counter(), bool(self.rows)
            if goes_on:
                self._forward()
            if len(self.rows) <= self.most_left and self.waiting:
                self._join()
            drafted = any(self.drafts)
            self._draw()
            if goes_on:
                tally.count(time.perf_counter() - begun, drafted)
        batches = (self.all[start : start + self.places] for start in range(0, len(self.all), self.places))
        tally.tokens += sum(max(len(row.new) for row in batch) - 1 for batch in batches)

    def _join(self) -> None:
        """Prefills rows that wait, as many as there are places, and puts them behind those that are left."""
        rows = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.places - len(self.rows)))]
        n_new = 1 if self.rows else max(row.limit for row in rows)
        found = prefill(self.model, rows, self.vocabulary.pad, n_new, self.cfg.prefill_chunk, self.drafter.n_tokens)
        cache, positions, hidden, logits = found
        self.drafter.begin(rows, self.cfg, self.vocabulary.n_tokens, n_new, hidden, positions)
        if self.rows:
            both = [*self.rows, *rows]
            length = max(row.position for row in both) + 1
            joined = new_cache(self.model, (len(both), length), max(row.limit - len(row.new) for row in both))
            joined.adopt([(self.cache, range(len(self.rows))), (cache, range(len(rows)))], length)
            cache, logits = joined, torch.cat([self.logits, logits])
        self.rows, self.cache, self.logits = [*self.rows, *rows], cache, logits
        self.drafts = [[] for _ in self.rows]

    def _forward(self) -> None:
        """Runs the model over each row's newest token and its draft, which is cut at the row's limit."""
        found = self.drafter.propose(self.rows) if self.drafter.tally.ready else [[]] * len(self.rows)
        self.drafts = [draft[: row.limit - len(row.new) - 1] for draft, row in zip(found, self.rows, strict=True)]
        given = [[row.new[-1], *draft] for row, draft in zip(self.rows, self.drafts, strict=True)]
        starts = [row.position for row in self.rows]
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
        told = [] if self.cfg.logprobs is None else logprobs(self.cfg.told(logits), ids, self.cfg.logprobs)
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
        """Appends a token to the row, unless it is an end; returns whether the row goes on.  told: of the token, [] where none is asked."""
        ended = token in self.vocabulary.ends
        if not ended:
            row.new.append(token)
            row.logprobs += told
            ended = (self.on_token is not None and self.on_token(row.index, token)) or len(row.new) >= row.limit
        if ended and self.on_end is not None:
            self.on_end(row)
        return not ended


class Ahead(Loop):
    """Without drafts: each forward begins before the host has read which tokens it is over, so that the device waits for no host. A row
    that turns out to have ended is dropped behind that forward."""

    def run(self) -> None:
        model, n_tokens = self.model, self.vocabulary.n_tokens
        places = model.max_seq_len if model.cfg.position.by_place else None
        going = list[int]()  # which rows have not ended; the others stay until half of them have, since a step is recorded for so many rows
        while self.waiting or going:
            if len(going) <= len(self.rows) // 2:
                self._keep(going)
                if self.waiting and len(going) <= self.most_left:
                    self._join()
                going = [*range(len(self.rows))]
                at = self._last_positions()
            logits = self.logits.squeeze(1)[:, :n_tokens]
            ids = choose(logits, self.rows, self.cfg).clamp(max=n_tokens - 1)  # of logits that are no numbers
            coming = Coming(ids, total(logits))
            if any(len(self.rows[i].new) + 1 < self.rows[i].limit for i in going):
                at = at + 1 if places is None else (at + 1).clamp(max=places - 1)  # of a row that has no place left, and ends
                self.logits = model(Batch(ids.unsqueeze(1), positions=at, padded=False), cache=self.cache)
            drawn, summed = coming.here()
            if not math.isfinite(summed):
                finite(logits)
            going = [i for i in going if self._goes_on(self.rows[i], drawn[i], [])]

    def _last_positions(self) -> Tensor:
        """Returns the position of the last token of each row that the model has read, (b, 1)."""
        return torch.tensor([[row.position] for row in self.rows], device=self.logits.device)

    def _keep(self, going: list[int]) -> None:
        if self.rows and len(going) < len(self.rows):
            self.logits = self.logits[going]
        super()._keep(going)


class Coming:
    """Numbers on their way from a device to the host."""

    def __init__(self, *numbers: Tensor) -> None:
        cuda = numbers[0].is_cuda
        self._held = [each.to("cpu", non_blocking=cuda) for each in numbers]
        self._sent = torch.cuda.Event() if cuda else None
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
