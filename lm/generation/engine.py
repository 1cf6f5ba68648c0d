"""Continuous batching: requests join and leave a running batch between its steps; each is answered as if it were alone."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from lm.generation.config import SamplingConfig
from lm.generation.decode import decoding
from lm.generation.loop import Row, Vocabulary
from lm.generation.prefill import asked_batch, chunks
from lm.generation.sampling import Logprob, choose, logprobs
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.head import CHUNK, Head, Reader, last_position
from lm.nn.transformer import LM
from lm.ops.cache.cache import Cache

_ROOM = 64  # places beyond the longest row, when a cache is made anew

Finish = Literal["stop", "length", "error"]


@dataclass(eq=False)
class Request:
    """A prompt, and the rows that continue it. For a row whose limit is 0 the prompt is prefilled, and no token is drawn."""

    rows: list[Row]
    cfg: SamplingConfig
    ends: Collection[int] = ()
    """A row ends at one of these tokens, which is not part of it."""
    scores: int | None = None
    """How many likeliest tokens are told at each place of the prompt, beside log p of its own tokens. None: nothing of the prompt is."""
    scored: list[Logprob] = field(default_factory=list)
    """What `scores` asks for: an entry for each token of the prompt from the second on."""

    @cached_property
    def way(self) -> str:
        """Returns a key of the sampling options: the next tokens of requests with the same key are drawn together."""
        return self.cfg.model_dump_json(exclude={"seed", "stop", "n", "max_tokens"})


@dataclass(eq=False)
class Sample:
    """A row of a request while it is decoded."""

    request: Request
    row: Row
    over: bool = False


@dataclass(frozen=True)
class Event:
    """What a step did to a sample: gave it a new token, or ended it, or both.  logprob: that of the new token, or of the end token."""

    sample: Sample
    token: int | None
    logprob: Logprob | None
    finish: Finish | None


class _Prompt:
    """The prompt of one request while it is prefilled, piece by piece."""

    def __init__(self, request: Request, model: LM, pad: int, chunk: int) -> None:
        row = request.rows[0]
        self.request, self.cache = request, model.new_cache(1, len(row.begin), horizon=model.max_seq_len)
        self.unread = deque(chunks(asked_batch(model, [row], pad), chunk))
        self.reader: Reader = last_position if request.scores is None else _Scores(row.begin, request)

    @property
    def n_next(self) -> int:
        """Returns how many tokens the next piece has, those of a source included."""
        piece = self.unread[0]
        return piece.tokens.numel() + (0 if piece.source_tokens is None else piece.source_tokens.numel())


class Engine:
    """One running batch of a model. `step` prefills waiting prompts, as far as rows are free, and gives every running row its next
    token."""

    def __init__(self, model: LM, vocabulary: Vocabulary, most_rows: int, chunk: int = 512) -> None:
        """vocabulary: whose ends are not looked at, since a request has its own.  most_rows: rows decoded together at most.  chunk: prompt
        tokens prefilled in one step, so that running rows do not wait for a long prompt."""
        self._model, self._vocabulary, self._most_rows, self._chunk = model.eval(), vocabulary, most_rows, chunk
        self._waiting: deque[Request] = deque()
        self._prompt: _Prompt | None = None  # of the first waiting request, where a part of it has been prefilled
        self._running: list[Sample] = []
        self._cache: Cache | None = None
        self._room = 0

    @property
    def waiting(self) -> int:
        """Returns how many prompts have not been prefilled to their end."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Returns how many rows are being decoded."""
        return sum(not sample.over for sample in self._running)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue. It has at most `most_rows` rows."""
        assert len(request.rows) <= self._most_rows
        self._waiting.append(request)

    def cancel(self, requests: Collection[Request]) -> None:
        """Drops requests that wait or run; no later step returns events of them."""
        self._waiting = deque(request for request in self._waiting if request not in requests)
        if self._prompt is not None and self._prompt.request in requests:
            self._prompt = None
        for sample in self._running:
            sample.over = sample.over or sample.request in requests

    def end(self, sample: Sample) -> None:
        """Ends a sample: no later step decodes it."""
        sample.over = True

    def clear(self) -> None:
        """Drops all requests and the cache, as after an allocation that failed."""
        self._waiting.clear()
        self._running, self._cache, self._prompt = [], None, None

    def step(self) -> list[Event]:
        """Prefills waiting prompts and draws the next token of each row; returns the events, none where no request is left."""
        with decoding(self._model):
            events: list[Event] = []
            joining: list[tuple[Cache, list[Sample]]] = []
            for request, logits, cache in self._read():
                samples = [Sample(request, row) for row in request.rows]
                events += self._drawn(logits.expand(len(samples), -1), samples)
                joining.append((cache, [sample for sample in samples if not sample.over]))
            self._regroup([(cache, samples) for cache, samples in joining if samples])
            if self._running:
                events += self._drawn(self._model(self._next(), read=last_position, cache=self._cache), self._running)
        return events

    def _read(self) -> Iterator[tuple[Request, Tensor, Cache]]:
        """Prefills waiting prompts in order, one piece at least; yields each request whose prompt is done, with the logits behind its last
        token, (1, v), and its cache of one row. Where a prompt is cut into pieces depends on that prompt alone."""
        rows, left = self.running, self._chunk
        while self._waiting and rows + len(self._waiting[0].rows) <= self._most_rows:
            prompt = self._prompt = self._prompt or _Prompt(self._waiting[0], self._model, self._vocabulary.pad, self._chunk)
            if prompt.n_next > left and left < self._chunk:
                return
            left -= prompt.n_next
            logits: Tensor = self._model(prompt.unread.popleft(), read=prompt.reader, cache=prompt.cache)
            if not prompt.unread:
                self._waiting.popleft()
                self._prompt, rows = None, rows + len(prompt.request.rows)
                yield prompt.request, logits, prompt.cache

    def _regroup(self, joining: Sequence[tuple[Cache, list[Sample]]]) -> None:
        """Makes one cache for the rows that are left and those that join, as long as the longest of them and _ROOM more, unless the one
        that there is can be kept."""
        kept = [i for i, sample in enumerate(self._running) if not sample.over]
        new = [(cache, sample) for cache, samples in joining for sample in samples]
        length = max((sample.row.position for sample in (*(self._running[i] for i in kept), *(sample for _, sample in new))), default=0)
        if self._cache is not None and self._stays(self._cache, [cache for cache, _ in new], length):
            left = [i for i, sample in enumerate(self._running) if sample.over]
            for row, (cache, sample) in zip(left, new, strict=True):
                self._cache.replace(row, cache)
                self._running[row] = sample
            return
        held = [(self._cache, kept)] if self._cache is not None and kept else []
        self._running = [self._running[i] for i in kept] + [sample for _, sample in new]
        self._cache = None
        if self._running:
            self._room = length + _ROOM
            cache = self._model.new_cache(len(self._running), self._room, horizon=self._model.max_seq_len)
            cache.adopt([*held, *((one, [0] * len(samples)) for one, samples in joining)], length)
            self._cache = cache

    def _stays(self, cache: Cache, joining: Sequence[Cache], length: int) -> bool:
        """Returns whether rows that join can take the places of as many that have left, so that the others are not copied: they fit beside
        the others, and the cache is neither full nor twice as long as its rows."""
        fits = all(one.length <= cache.length and one.memory_positions is None for one in joining)
        return fits and len(self._running) - self.running == len(joining) and cache.length < min(self._room, 2 * length + _ROOM)

    def _next(self) -> Batch:
        """Returns the next input: the newest token of each row, at the position behind the row's tokens in the cache."""
        rows, device = [sample.row for sample in self._running], self._model.embed.weight.device
        ids, positions = [row.new[-1:] for row in rows], [[row.position] for row in rows]
        return Batch(torch.tensor(ids, device=device), positions=torch.tensor(positions, device=device), padded=False)

    def _drawn(self, logits: Tensor, samples: Sequence[Sample]) -> list[Event]:
        """Draws the next token of each sample; returns its event.  logits: (b, v)."""
        finite = self._finite(logits[:, : self._vocabulary.n_tokens])
        events = [self._ended(sample, "error") for sample, fine in zip(samples, finite, strict=True) if not fine]
        events += [self._ended(sample, "length") for sample, fine in zip(samples, finite, strict=True) if fine and not sample.row.limit]
        going = [i for i, sample in enumerate(samples) if not sample.over]
        for _, places in groupby(sorted(going, key=lambda i: samples[i].request.way), key=lambda i: samples[i].request.way):
            group = list(places)
            chosen, cfg = [samples[i] for i in group], samples[group[0]].request.cfg
            rows = logits if len(group) == len(samples) else logits[group]
            ids = choose(rows[:, : self._vocabulary.n_tokens], [sample.row for sample in chosen], cfg)
            found = [None] * len(group) if cfg.logprobs is None else logprobs(cfg.told(rows), ids, cfg.logprobs)
            events += [self._went_on(*each) for each in zip(chosen, ids.tolist(), found, strict=True)]
        return events

    def _finite(self, logits: Tensor) -> list[bool]:
        """Returns for each row whether its logits are finite. As in `lm.generation.loop.finite`, the sums tell, unless one is not
        finite."""
        sums = torch.isfinite(logits.sum(-1, dtype=torch.float32)).tolist()
        return sums if all(sums) else torch.isfinite(logits).all(-1).tolist()

    def _went_on(self, sample: Sample, token: int, logprob: Logprob | None) -> Event:
        """Appends a drawn token to the sample, unless it is an end; returns the event."""
        if token in sample.request.ends:
            return self._ended(sample, "stop", logprob)
        sample.row.new.append(token)
        sample.over = len(sample.row.new) >= sample.row.limit
        return Event(sample, token, logprob, "length" if sample.over else None)

    def _ended(self, sample: Sample, finish: Finish, logprob: Logprob | None = None) -> Event:
        sample.over = True
        return Event(sample, None, logprob, finish)


class _Scores:
    """A reader that returns the logits of the last position, and appends log p of the prompt's tokens to `request.scored`, piece by
    piece."""

    def __init__(self, tokens: Sequence[int], request: Request) -> None:
        self._labels, self._request = list(tokens[1:]), request

    def __call__(self, hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        n, s = self._request.scores or 0, hidden.shape[1]
        labels, self._labels = torch.tensor(self._labels[:s], dtype=torch.int64, device=hidden.device), self._labels[s:]
        for some, ids in zip(hidden[0, : len(labels)].split(CHUNK), labels.split(CHUNK), strict=True):
            self._request.scored += logprobs(head(some), ids, n) if len(ids) else []
        return last_position(hidden, head, ctx)
