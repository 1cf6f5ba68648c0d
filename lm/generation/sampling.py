"""From logits to the next token. Randomness is a function of (seed, prompt, occurrence of that prompt, step), never a state.

`choose(logits, rows, cfg)` does all of it: each row brings its history and the key of its draws, and len(row.new) is the step.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.generation.config import SamplingConfig

if TYPE_CHECKING:
    from lm.generation.grammar import Matcher

HIDDEN = float("-inf")  # the logit of a token that cannot be drawn
_PIECES = 256  # of a row of logits, among which a GPU looks for the highest
_COLDEST = 1e-6  # a lower temperature is no colder, and would divide by zero in float32


@dataclass
class History:
    """What the next token of a row depends on beside the logits: its tokens so far, the key of its draws and its grammar."""

    key: bytes
    """Key of the row's random draws, from `row_keys`."""
    begin: list[int]
    """What the decoder read first: the prompt, or a start token."""
    new: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    """What an encoder read; empty in a decoder."""
    matcher: "Matcher | None" = None
    """Follows the grammar that the output must match. None: the output may be anything."""

    def extended(self, draft: Sequence[int]) -> "History":
        """Returns the history with the draft appended to the new tokens."""
        return History(self.key, self.begin, [*self.new, *draft], self.source, self.matcher) if draft else self


@dataclass(frozen=True)
class Logprob:
    """A token, log p of it under the model itself, and the likeliest tokens with log p of each, likeliest first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def logprobs(logits: Tensor, ids: Tensor, n: int) -> list[Logprob]:
    """Returns for each row log p, in float32, of its token and of the n likeliest tokens.  logits: (b, v), raw; ids: (b,)."""
    found = logits.float().log_softmax(-1)
    own, top = found.gather(1, ids.unsqueeze(1)).squeeze(1), found.topk(min(n, found.shape[1]), -1)
    ranked = [list(zip(*pair, strict=True)) for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
    return [Logprob(*row) for row in zip(ids.tolist(), own.tolist(), ranked, strict=True)]


def biased(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """logits + bias.  logits: (b, v)."""
    return logits.index_add(1, torch.tensor([*bias], device=logits.device), logits.new_tensor([[*bias.values()]]).expand(len(logits), -1))


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divides the logits of seen tokens by the penalty, but multiplies negative ones, which Keskar et al. 2019, section 4.1, divide too
    (this would favour them).  logits: (b, v); seen: (b, v) bool."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def counts(texts: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """Returns how often each token is in the text of each row, in the shape (b, v), dtype and device of `like`."""
    tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64, device=like.device)
    rows = torch.repeat_interleave(torch.tensor([*map(len, texts)], device=like.device))
    known = tokens < like.shape[1]
    return torch.zeros_like(like).index_put_((rows[known], tokens[known]), like.new_ones(()), accumulate=True)


def no_repeat(logits: Tensor, texts: Sequence[Sequence[int]], n: int) -> Tensor:
    """Hides tokens that would complete an n-gram that the row's text has already; none where this would hide all.  logits: (b, v).

    The texts are scanned at each step, which costs less than a forward. As `NoRepeatNGramLogitsProcessor` of transformers.
    """
    ends = [[t[i + n - 1] for i in range(len(t) - n + 1) if t[i : i + n - 1] == t[len(t) - n + 1 :]] for t in map(list, texts)]
    hidden = counts(ends, logits) > 0
    some = ((logits > HIDDEN) & ~hidden).any(-1, keepdim=True)
    return logits.masked_fill(hidden & some, HIDDEN)


def top_k(logits: Tensor, k: int) -> Tensor:
    """Hides all but the k highest logits; ties with the k-th stay.  Fan et al. 2018, arXiv:1805.04833."""
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, HIDDEN)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the smallest set of tokens whose probability reaches p, at least one.  Holtzman et al. 2019, arXiv:1904.09751, eq. 2-3."""
    ranked, order = logits.sort(descending=True, stable=True)
    probabilities = ranked.softmax(-1)
    surplus = probabilities.cumsum(-1) - probabilities >= p
    return logits.masked_fill(surplus.scatter(-1, order, surplus), HIDDEN)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Hides tokens less likely than p times the likeliest one.  Nguyen et al. 2024, arXiv:2407.01082, section 3."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), HIDDEN)


class Filters(Protocol):
    """Which tokens may be drawn, and how likely."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...


def filtered(logits: Tensor, cfg: Filters) -> Tensor:
    """Returns the logits after temperature, top_k, top_p and min_p, in the order of `transformers`; float32."""
    logits = (logits - logits.amax(-1, keepdim=True)) / max(cfg.temperature, _COLDEST)
    if cfg.top_k is not None:
        logits = top_k(logits, cfg.top_k)
    if cfg.top_p is not None and cfg.top_p < 1:
        logits = top_p(logits, cfg.top_p)
    if cfg.min_p is not None:
        logits = min_p(logits, cfg.min_p)
    return logits


def grammatical(rows: Sequence[History], like: Tensor) -> Tensor:
    """Returns which tokens each row's matcher allows, (b, v)."""
    v = like.shape[1]
    free = torch.ones(v, dtype=torch.bool)
    return torch.stack([free if row.matcher is None else row.matcher.allowed(row.new, v) for row in rows]).to(like.device)


def adjusted(logits: Tensor, rows: Sequence[History], cfg: SamplingConfig) -> Tensor:
    """Returns the logits after the grammar and then, in the order of `transformers`, logit_bias, penalties and no_repeat_ngram.  logits:
    (b, v), float32."""
    if any(row.matcher is not None for row in rows):
        logits = logits.masked_fill(~grammatical(rows, logits), HIDDEN)
    if cfg.logit_bias:
        logits = biased(logits, cfg.logit_bias)
    if cfg.repetition_penalty != 1:
        logits = penalise(logits, counts([row.begin + row.new for row in rows], logits) > 0, cfg.repetition_penalty)
    if cfg.presence_penalty or cfg.frequency_penalty:
        often = counts([row.new for row in rows], logits)
        logits = logits - cfg.presence_penalty * (often > 0) - cfg.frequency_penalty * often
    if cfg.no_repeat_ngram is not None:
        logits = no_repeat(logits, [row.begin + row.new for row in rows], cfg.no_repeat_ngram)
    return logits


def choose(logits: Tensor, rows: Sequence[History], cfg: SamplingConfig) -> Tensor:
    """Returns the next token of each row, (b,): the likeliest at temperature 0, else the token at which the cumulative distribution goes
    beyond the row's uniform number.

    logits: (b, v), raw, of tokens that may be drawn. Rows with different configs need one call for each config.
    """
    logits = adjusted(logits.float(), rows, cfg)
    if cfg.temperature == 0:
        return likeliest(logits)
    return drawn(filtered(logits, cfg), [uniform(row.key, len(row.new)) for row in rows])


def likeliest(logits: Tensor) -> Tensor:
    """Returns the first of each row's highest logits, (b, v) -> (b,). torch's argmax gives a row to one block of a GPU; here many blocks
    look at a piece each."""
    if not logits.is_cuda:
        return logits.argmax(-1)
    return by_pieces(logits)


def by_pieces(logits: Tensor) -> Tensor:
    """Returns logits.argmax(-1), first within pieces of the row and then among these."""
    values, places = F.pad(logits, (0, -logits.shape[1] % _PIECES), value=HIDDEN).unflatten(1, (_PIECES, -1)).max(-1)  # (b, pieces)
    piece = values.argmax(-1, keepdim=True)
    return (piece * -(-logits.shape[1] // _PIECES) + places.gather(1, piece)).squeeze(1)


def drawn(logits: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Returns for each row the token at which the cumulative distribution goes beyond the row's number, (b,).  uniforms: b numbers in
    [0, 1)."""
    if logits.device.type == "mps":  # which has no float64
        return drawn(logits.cpu(), uniforms).to(logits.device)
    mass, numbers = logits.double().softmax(-1).cumsum(-1), torch.tensor(uniforms, dtype=torch.float64)
    if logits.is_cuda:  # else the host would wait for all that the device is still to do
        numbers = numbers.pin_memory()
    targets = numbers.to(logits.device, non_blocking=True).unsqueeze(-1) * mass[:, -1:]
    return torch.searchsorted(mass, targets, right=True).squeeze(-1)


def row_keys(prompts: Sequence[Sequence[int]], seed: int) -> list[bytes]:
    """Returns the key of each row's draws: a hash of the seed, the prompt, and how many rows before it have the same prompt. It does not
    depend on the place in the batch."""
    before, keys = Counter[tuple[int, ...]](), []
    for prompt in map(tuple, prompts):
        keys.append(hashlib.blake2b(f"{seed}/{before[prompt]}/{prompt}".encode(), digest_size=16).digest())
        before[prompt] += 1
    return keys


def uniform(key: bytes, step: int) -> float:
    """Returns the number in [0, 1) of a row's draw at a step. It is a multiple of 2^-48, so that its product with a probability mass near 1
    stays below that mass in float64."""
    digest = hashlib.blake2b(key + step.to_bytes(8, "little"), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
