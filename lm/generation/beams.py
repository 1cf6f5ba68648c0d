"""Beam search: at every step the likeliest few continuations of a prompt go on, and those that have ended are kept apart."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.decode import begin, decoding, room
from lm.generation.grammar import Matcher
from lm.generation.loop import ROWS, Vocabulary, finite
from lm.generation.prefill import asked_batch, chunks, new_cache
from lm.generation.sampling import History, adjusted
from lm.nn.batch import Batch
from lm.nn.head import last_position
from lm.nn.transformer import LM

Ended = Callable[[list[int]], bool]


@dataclass(frozen=True)
class Beam:
    """The new tokens of a beam, without the end token.  score: the sum of their log-probabilities in nats, the end token's too; of a beam
    that has ended, divided by length^length_penalty."""

    tokens: list[int]
    score: float


@dataclass
class _Search:
    """The beam search of one prompt; it goes on while it has running beams."""

    source: list[int]
    begin: list[int]
    limit: int
    cfg: SamplingConfig
    ends: Collection[int]
    ended: Ended | None
    matcher: Matcher | None
    running: list[Beam] = field(default_factory=lambda: [Beam([], 0.0)])
    found: list[Beam] = field(default_factory=list)

    def step(self, candidates: Sequence[tuple[float, int, int]]) -> list[int]:
        """Extends running beams by the likeliest candidates (score, running beam, token), best first; returns the parent of each beam that
        now runs.

        As in `transformers`: a candidate that ends counts only among the best cfg.beams, and further candidates fill the places of those.
        """
        parents: list[int] = []
        going: list[Beam] = []
        length = len(self.running[0].tokens) + 1
        for rank, (score, parent, token) in enumerate(candidates):
            if score == -math.inf:  # the grammar forbids this candidate and all behind it
                break
            before = self.running[parent].tokens
            tokens = before if token in self.ends else [*before, token]
            if token in self.ends or length == self.limit or (self.ended is not None and self.ended(tokens)):
                if rank < self.cfg.beams:
                    self.found.append(Beam(tokens, self._score(score, length)))
            elif len(going) < self.cfg.beams:
                going.append(Beam(tokens, score))
                parents.append(parent)
        self.found = sorted(self.found, key=lambda beam: -beam.score)[: self.cfg.beams]
        over = not going or self._settled(going[0].score, length)
        self.running = [] if over else going
        return [] if over else parents

    def _settled(self, best: float, length: int) -> bool:
        """Returns whether no running beam is expected to replace one of the ended ones, as cfg.early_stopping judges it."""
        if len(self.found) < self.cfg.beams:
            return False
        reached = self.limit if self.cfg.early_stopping == "never" and self.cfg.length_penalty > 0 else length
        return self.cfg.early_stopping is True or self._score(best, reached) <= self.found[-1].score

    def _score(self, total: float, length: int) -> float:
        """Returns total / length^length_penalty; as in `transformers`, a given first token of an answer counts."""
        given = len(self.begin) - 1 if self.source else 0
        return float(total / (length + given) ** self.cfg.length_penalty)


def search(
    model: LM, prompts: Sequence[Sequence[int]], cfg: SamplingConfig, vocabulary: Vocabulary | None = None, ended: Ended | None = None
) -> Iterator[list[Beam]]:
    """Yields the cfg.n best of cfg.beams beams of each prompt, best first, fewer where a grammar has fewer texts. They are those that
    `transformers` finds with num_beams=cfg.beams.

    Prompts, limits and errors are those of `decode`.  ended(tokens): whether the last of these new tokens ends a beam, which keeps
    it. Raises ConfigError where the vocabulary has fewer tokens than beams and ends need.
    """
    vocabulary = vocabulary or Vocabulary(model.vocab_size)
    n_tokens, ends, first = vocabulary.n_tokens, vocabulary.ends, vocabulary.first
    cfg.require(n_tokens)
    if cfg.beams + len(ends) > n_tokens:
        raise ConfigError(f"beams={cfg.beams} and {len(ends)} ends are more than the {n_tokens} tokens of the vocabulary. Lower beams.")
    reads, matcher = model.cfg.kind == "encoder_decoder", vocabulary.matcher
    searches = [
        _Search(prompt if reads else [], begin(model, prompt, first), room(model, prompt, cfg, first), cfg, ends, ended, matcher())
        for prompt in map(list, prompts)
    ]
    at_once = max(1, ROWS // cfg.beams)
    for start in range(0, len(searches), at_once):
        some = searches[start : start + at_once]
        with decoding(model):
            _run(model, some, cfg, vocabulary)
        yield from (search.found[: cfg.n] for search in some)


def _run(model: LM, searches: list[_Search], cfg: SamplingConfig, vocabulary: Vocabulary) -> None:
    batch = asked_batch(model, searches, vocabulary.pad)
    cache = new_cache(model, batch.tokens.shape, max(search.limit for search in searches))
    *_, logits = (model(piece, read=last_position, cache=cache) for piece in chunks(batch, cfg.prefill_chunk))
    while True:
        logits = finite(logits[:, : vocabulary.n_tokens])  # (running beams, v)
        histories = [History(b"", search.begin, beam.tokens, matcher=search.matcher) for search in searches for beam in search.running]
        log_probs = adjusted(logits.float().log_softmax(-1), histories, cfg)
        parents = _step(searches, log_probs)
        searches = [search for search in searches if search.running]
        if not searches:
            return
        if parents != list(range(len(log_probs))):
            rows = torch.tensor(parents, dtype=torch.int64, device=log_probs.device)
            cache.reorder(rows)
        last = [(beam.tokens[-1], len(search.begin) + len(beam.tokens) - 1) for search in searches for beam in search.running]
        ids, positions = torch.tensor(last, dtype=torch.int64, device=log_probs.device).view(-1, 2).unsqueeze(1).unbind(-1)  # (b, 1) each
        logits = model(Batch(ids, positions=positions, padded=False), read=last_position, cache=cache)


def _step(searches: Sequence[_Search], log_probs: Tensor) -> list[int]:
    """Makes a step of each search; returns for each beam that now runs the row of its parent.  log_probs: (running beams of all, v)."""
    parents, first = [], 0
    for search in searches:
        scores = torch.tensor([[beam.score] for beam in search.running], device=log_probs.device)
        totals = (log_probs[first : first + len(scores)] + scores).flatten()  # (beams, v) -> (beams * v)
        best = totals.topk(min(len(totals), max(2, 1 + len(search.ends)) * search.cfg.beams))
        places = (divmod(place, log_probs.shape[1]) for place in best.indices.tolist())
        candidates = [(score, *place) for score, place in zip(best.values.tolist(), places, strict=True)]
        parents += [first + parent for parent in search.step(candidates)]
        first += len(scores)
    return parents
