"""From logits to the next token. Randomness is a function of (seed, prompt, its occurrence, step), never a state."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from lm.generation.config import SamplingConfig

HIDDEN = float("-inf")  # the logit of a token that cannot be drawn
_COLDEST = 1e-6  # a lower temperature is no colder, and would divide by zero in float32


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits of seen tokens divided by the penalty; negative ones multiplied, where Keskar et al. 2019, section 4.1, divide too
    (which would favour them).  logits: (b, v); seen: (b, v) bool."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def top_k(logits: Tensor, k: int) -> Tensor:
    """All but the k highest hidden; equals of the k-th stay.  Fan et al. 2018, arXiv:1805.04833."""
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, HIDDEN)


def top_p(logits: Tensor, p: float) -> Tensor:
    """The smallest set of tokens whose probability reaches p stays, at least one.  Holtzman et al. 2019, arXiv:1904.09751, eq. 2-3."""
    ranked, order = logits.sort(descending=True, stable=True)
    probabilities = ranked.softmax(-1)
    surplus = probabilities.cumsum(-1) - probabilities >= p
    return logits.masked_fill(surplus.scatter(-1, order, surplus), HIDDEN)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Tokens less likely than p times the likeliest hidden.  Nguyen et al. 2024, arXiv:2407.01082, section 3."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), HIDDEN)


def filtered(logits: Tensor, cfg: SamplingConfig) -> Tensor:
    """Temperature and filters, in the order of `transformers`; float32."""
    logits = (logits - logits.amax(-1, keepdim=True)) / max(cfg.temperature, _COLDEST)
    if cfg.top_k is not None:
        logits = top_k(logits, cfg.top_k)
    if cfg.top_p is not None and cfg.top_p < 1:
        logits = top_p(logits, cfg.top_p)
    if cfg.min_p is not None:
        logits = min_p(logits, cfg.min_p)
    return logits


def choose(logits: Tensor, seen: Tensor | None, cfg: SamplingConfig, uniforms: Sequence[float]) -> Tensor:
    """The next token of each row, (b,): the likeliest, or the one at `uniforms` of the cumulative distribution.

    logits: (b, v); seen: (b, v) bool, tokens of each row so far, needed for a repetition penalty; uniforms: b numbers in [0, 1).
    """
    logits = logits.float()
    if seen is not None and cfg.repetition_penalty != 1:
        logits = penalise(logits, seen, cfg.repetition_penalty)
    if cfg.temperature == 0:
        return logits.argmax(-1)
    mass = filtered(logits, cfg).double().softmax(-1).cumsum(-1)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).unsqueeze(-1) * mass[:, -1:]
    return torch.searchsorted(mass, targets, right=True).squeeze(-1)  # the first token whose mass goes beyond the target


def row_keys(prompts: Sequence[Sequence[int]], seed: int) -> list[bytes]:
    """What a row's draws depend on: the seed, its prompt, and how often that prompt came before it; not its place in the batch."""
    before: Counter[tuple[int, ...]] = Counter()
    keys = []
    for prompt in map(tuple, prompts):
        keys.append(hashlib.blake2b(f"{seed}/{before[prompt]}/{prompt}".encode(), digest_size=16).digest())
        before[prompt] += 1
    return keys


def uniform(key: bytes, step: int) -> float:
    """A number in [0, 1), a multiple of 2^-48, so that its product with a mass near 1 stays below that mass in float64."""
    digest = hashlib.blake2b(key + step.to_bytes(8, "little"), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48
