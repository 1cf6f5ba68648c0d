"""A recurrence over a matrix of fixed size: every token fades it, writes a key with a value into it, and reads it with a query.

Linear attention (Katharopoulos et al. 2020, arXiv:2006.16236) with a decay of each head (Mamba-2: Dao & Gu 2024, arXiv:2405.21060) or each
channel of a key (Yang et al. 2023, arXiv:2312.06635), and with the delta rule, which replaces the value that the state holds for a key
(Yang et al. 2024, arXiv:2412.06464).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.ops.precision import wide

CHUNK, SMALL_CHUNK = 64, 16  # tokens of a chunk, within which pairs are scored; small: with a decay for each channel


@dataclass(frozen=True)
class Flow:
    """The recurrence's inputs for the tokens of rows, in float32 or wider.

    q, k: (b, h, s, k); v: (b, h, s, v); decay: (b, h, s, 1 or k), the logarithm of the factor on the state, or on each of its channels, at
    most 0; beta: (b, h, s, 1), the part of the value held for k that v replaces; None: v is added, and nothing is replaced.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Flow":
        """Returns a flow with every tensor changed."""
        beta = None if self.beta is None else change(self.beta)
        return Flow(change(self.q), change(self.k), change(self.v), change(self.decay), beta)

    def without(self, padding: Tensor) -> "Flow":
        """Returns a flow in which padding neither writes nor fades.  padding: (b, s)."""
        hidden = padding[:, None, :, None]  # (b, 1, s, 1)
        return self.each(lambda x: x.masked_fill(hidden, 0))

    def part(self, start: int, stop: int) -> "Flow":
        """Returns the flow of tokens start..stop-1."""
        return self.each(lambda x: x[:, :, start:stop])

    def empty(self) -> Tensor:
        """Returns the state before the first token, (b, h, k, v)."""
        return self.v.new_zeros(*self.k.shape[:2], self.k.shape[-1], self.v.shape[-1])


def by_head(x: Tensor, heads: int, repeats: int = 1) -> Tensor:
    """(b, s, h * c) -> (b, h * repeats, s, c), in float32 or wider; each head is repeated for those that share it."""
    split = wide(x).unflatten(-1, (heads, -1)).transpose(1, 2)
    return split.repeat_interleave(repeats, dim=1) if repeats > 1 else split


def reference(flow: Flow, state: Tensor, documents: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Token by token: S = exp(decay) S; S = S + k (beta (v - S^T k))^T, or S + k v^T; o = S^T q.

    documents: (b, s); a token of another one than the token before it finds an empty state.
    Returns (b, h, s, v) and the state after each token.
    """
    out, states = [], []
    for t in range(flow.q.shape[2]):
        if documents is not None and t:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        k, v = flow.k[:, :, t], flow.v[:, :, t]
        state = state * flow.decay[:, :, t].exp().unsqueeze(-1)
        if flow.beta is not None:
            v = flow.beta[:, :, t] * (v - _read(state, k))
        state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
        out.append(_read(state, flow.q[:, :, t]))
        states.append(state)
    return torch.stack(out, dim=2), states


def chunked(flow: Flow, state: Tensor, documents: Tensor | None = None, size: int | None = None) -> tuple[Tensor, Tensor]:
    """As `reference`, by matrix products: pairs within a chunk, and a state from chunk to chunk.  Returns (b, h, s, v) and the last state.

    No factor is above 1, since only differences of sums of decays are exponentiated. What the delta rule writes in a chunk solves a
    triangular system, (I + A) new = beta (v - the value held for k in the state before the chunk), A_ij = beta_i sum_c k_ic k_jc decay_ijc
    for j < i.
    """
    s, size = flow.q.shape[2], size or (CHUNK if flow.decay.shape[-1] == 1 else SMALL_CHUNK)
    flow, documents = _filled(flow, documents, -s % size)
    q, k, v, faded = (each.unflatten(2, (-1, size)) for each in (flow.q, flow.k, flow.v, flow.decay))  # (b, h, s, ..) -> (b, h, n, c, ..)
    faded = faded.cumsum(-2)
    enters, leaves = faded.exp(), (faded[..., -1:, :] - faded).exp()
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    if documents is not None:
        of = documents.unflatten(1, (-1, size)).unsqueeze(1)  # (b, s) -> (b, 1, n, c)
        before = torch.cat([of[:, :, :1, :1], of[:, :, :-1, -1:]], dim=2)
        seen = seen & (of.unsqueeze(-1) == of.unsqueeze(-2))
        enters, leaves = enters * (of == before).unsqueeze(-1), leaves * (of == of[..., -1:]).unsqueeze(-1)
    pairs = (faded.unsqueeze(-2) - faded.unsqueeze(-3)).masked_fill(~seen.unsqueeze(-1), float("-inf")).exp()  # (.., c, c, 1 or k)
    scores, into, out_of = _scores(q, k, pairs), (k * leaves).mT, q * enters
    held: tuple[Tensor, ...] | None = None
    if flow.beta is not None:
        beta = flow.beta.unflatten(2, (-1, size))
        system = _scores(beta * k, k, pairs).tril(-1)  # the diagonal is taken to be 1
        right = torch.cat([beta * v, beta * k * enters], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        v, of_k = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        held = of_k.unbind(2)
    out, left = [], enters[..., -1, :].unsqueeze(-1)
    chunks = [x.unbind(2) for x in (out_of, scores, into, left, v)]  # each x[:, :, n] would have a gradient as large as x
    for n, (reads, among, writes, fades, new) in enumerate(zip(*chunks, strict=True)):
        if held is not None:
            new = new - held[n] @ state
        out.append(reads @ state + among @ new)
        state = fades * state + writes @ new
    return torch.stack(out, dim=2).flatten(2, 3)[:, :, :s], state


def _scores(q: Tensor, k: Tensor, pairs: Tensor) -> Tensor:
    """sum_c q_ic k_jc pairs_ijc, (.., c, c); one channel of pairs stands for all."""
    if pairs.shape[-1] == 1:
        return (q @ k.mT) * pairs.squeeze(-1)
    return (q.unsqueeze(-2) * pairs * k.unsqueeze(-3)).sum(-1)


def _filled(flow: Flow, documents: Tensor | None, n: int) -> tuple[Flow, Tensor | None]:
    """Returns the flow with n further tokens that write nothing and belong to the document of the last one."""
    if not n:
        return flow, documents
    filled = flow.each(lambda x: F.pad(x, (0, 0, 0, n)))
    return filled, None if documents is None else torch.cat([documents, documents[:, -1:].expand(-1, n)], dim=1)


def _read(state: Tensor, q: Tensor) -> Tensor:
    """(b, h, k, v), (b, h, k) -> (b, h, v)."""
    return (state * q.unsqueeze(-1)).sum(-2)
