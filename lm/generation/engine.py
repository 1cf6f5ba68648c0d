"""Requests that join and leave a running batch between its steps; each is answered as if it were alone."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from lm.generation.config import SamplingConfig
from lm.generation.decode import Row, begin, decoding, filled
from lm.generation.sampling import Logprob, choose, logprobs
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.head import CHUNK, Head, last_position
from lm.nn.mixers.cache import Cache
from lm.nn.transformer import LM

_ROOM = 64  # places beyond the longest row, when a cache is made anew
_READ = 512  # tokens of prompts that are read between two steps, or one prompt

Finish = Literal["stop", "length", "error"]


@dataclass(eq=False)
class Request:
    """A prompt, and the rows that continue it. A row with no room for new tokens has its prompt read, and no more."""

    rows: list[Row]
    cfg: SamplingConfig
    ends: Collection[int] = ()
    scores: int | None = None
    """Log p of the prompt's own tokens is told, and so many likeliest tokens at each place. None: it is not."""
    scored: list[Logprob] = field(default_factory=list)
    """Of the prompt's second token, its third ..."""

    @property
    def way(self) -> str:
        """Returns what decides how its tokens are drawn: requests of one way are drawn together."""
        return self.cfg.model_dump_json(exclude={"seed", "stop", "n", "max_tokens"})


@dataclass(eq=False)
class Sample:
    """A row of a request while it is decoded."""

    request: Request
    row: Row
    over: bool = False


@dataclass(frozen=True)
class Event:
    """What a step made of a sample: a token, or its end, or both.  told: of that token, or of the one that ended it."""

    sample: Sample
    token: int | None
    told: Logprob | None
    finish: Finish | None


class Engine:
    """One batch of a model. `step` reads prompts that wait, as far as there are rows, and gives every running row its next token."""

    def __init__(self, model: LM, pad: int, n_tokens: int, most_rows: int) -> None:
        """n_tokens: ids from here on are never drawn.  most_rows: decoded together."""
        begin(model, [0])  # raises ConfigError for a model that continues nothing
        self._model, self._pad, self._n_tokens, self._most_rows = model.eval(), pad, n_tokens, most_rows
        self._waiting: deque[Request] = deque()
        self._running: list[Sample] = []
        self._cache: Cache | None = None
        self._room = 0

    @property
    def waiting(self) -> int:
        """Returns how many prompts have not been read yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Returns how many rows are decoded."""
        return sum(not sample.over for sample in self._running)

    def add(self, request: Request) -> None:
        """Puts a request behind those that wait. It has no more rows than are decoded together."""
        assert len(request.rows) <= self._most_rows
        self._waiting.append(request)

    def cancel(self, requests: Collection[Request]) -> None:
        """Forgets requests, before the next step."""
        self._waiting = deque(request for request in self._waiting if request not in requests)
        for sample in self._running:
            sample.over = sample.over or sample.request in requests

    def end(self, sample: Sample) -> None:
        """Decodes a row no further."""
        sample.over = True

    def clear(self) -> list[Request]:
        """Forgets everything, as after an allocation that failed; returns the requests that are not answered."""
        lost = [*self._waiting, *dict.fromkeys(sample.request for sample in self._running if not sample.over)]
        self._waiting.clear()
        self._running, self._cache = [], None
        return lost

    def step(self) -> list[Event]:
        """Returns what became of each row; nothing where no request is left."""
        with decoding(self._model):
            events: list[Event] = []
            joining: list[tuple[Cache, list[Sample]]] = []
            for request in self._admitted():
                logits, cache = self._read(request)
                samples = [Sample(request, row) for row in request.rows]
                events += self._drawn(logits.expand(len(samples), -1), samples)
                joining.append((cache, [sample for sample in samples if not sample.over]))
            self._regroup([(cache, samples) for cache, samples in joining if samples])
            if self._running:
                events += self._drawn(self._model(self._next(), loss=last_position, cache=self._cache), self._running)
        return events

    def _admitted(self) -> Iterator[Request]:
        rows, read = self.running, 0
        while self._waiting and rows + len(self._waiting[0].rows) <= self._most_rows:
            row = self._waiting[0].rows[0]
            read += len(row.source) + len(row.begin)
            if read > _READ and rows > self.running:
                return
            rows += len(self._waiting[0].rows)
            yield self._waiting.popleft()

    def _read(self, request: Request) -> tuple[Tensor, Cache]:
        """The logits behind a prompt, (1, v), and a cache of one row that holds it."""
        row, device = request.rows[0], self._model.embed.weight.device
        cache = self._model.new_cache(1, len(row.begin), horizon=self._model.max_seq_len)
        reader = last_position if request.scores is None else _Scores(row.begin, request)
        logits: Tensor = self._model(filled([row], self._pad, device), loss=reader, cache=cache)
        return logits, cache

    def _regroup(self, joining: Sequence[tuple[Cache, list[Sample]]]) -> None:
        """One cache for the rows that are left and those that join; as wide as the longest of them, and a little room."""
        kept = [i for i, sample in enumerate(self._running) if not sample.over]
        length = 0 if self._cache is None else self._cache.length
        if not joining and len(kept) == len(self._running) and length < self._room:
            return
        held = [(self._cache, kept)] if self._cache is not None and kept else []
        self._running = [self._running[i] for i in kept] + [sample for _, samples in joining for sample in samples]
        self._cache = None
        if self._running:
            length = max(len(sample.row.begin) + len(sample.row.new) - 1 for sample in self._running)
            self._room = length + _ROOM
            cache = self._model.new_cache(len(self._running), self._room, horizon=self._model.max_seq_len)
            cache.adopt([*held, *((one, [0] * len(samples)) for one, samples in joining)], length)
            self._cache = cache

    def _next(self) -> Batch:
        """The last new token of each row, behind what the cache holds of it."""
        rows, device = [sample.row for sample in self._running], self._model.embed.weight.device
        positions = [[len(row.begin) + len(row.new) - 1] for row in rows]
        return Batch(torch.tensor([row.new[-1:] for row in rows], device=device), positions=torch.tensor(positions, device=device))

    def _drawn(self, logits: Tensor, samples: Sequence[Sample]) -> list[Event]:
        """The next token of each row.  logits: (b, v)."""
        finite = torch.isfinite(logits[:, : self._n_tokens]).all(-1).tolist()
        events = [self._ended(sample, "error") for sample, fine in zip(samples, finite, strict=True) if not fine]
        events += [self._ended(sample, "length") for sample, fine in zip(samples, finite, strict=True) if fine and not sample.row.limit]
        going = [i for i, sample in enumerate(samples) if not sample.over]
        for _, places in groupby(sorted(going, key=lambda i: samples[i].request.way), key=lambda i: samples[i].request.way):
            group = list(places)
            chosen, cfg = [samples[i] for i in group], samples[group[0]].request.cfg
            rows = logits[group]
            ids = choose(rows[:, : self._n_tokens], [sample.row for sample in chosen], cfg)
            told = [None] * len(group) if cfg.logprobs is None else logprobs(rows, ids, cfg.logprobs)
            events += [self._went_on(*each) for each in zip(chosen, ids.tolist(), told, strict=True)]
        return events

    def _went_on(self, sample: Sample, token: int, told: Logprob | None) -> Event:
        if token in sample.request.ends:
            return self._ended(sample, "stop", told)
        sample.row.new.append(token)
        sample.over = len(sample.row.new) >= sample.row.limit
        return Event(sample, token, told, "length" if sample.over else None)

    def _ended(self, sample: Sample, finish: Finish, told: Logprob | None = None) -> Event:
        sample.over = True
        return Event(sample, None, told, finish)


class _Scores:
    """A reader of the last position that tells the request log p of its prompt."""

    def __init__(self, tokens: Sequence[int], request: Request) -> None:
        self._tokens, self._request = tokens, request

    def __call__(self, hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        n = self._request.scores or 0
        labels = torch.tensor(self._tokens[1:], device=hidden.device)
        for some, ids in zip(hidden[0, :-1].split(CHUNK), labels.split(CHUNK), strict=True):
            self._request.scored += logprobs(head(some), ids, n) if len(ids) else []
        return last_position(hidden, head, ctx)
