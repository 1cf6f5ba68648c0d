"""A matrix of fixed size that goes through the row: every token fades it, writes a key with a value into it, and reads it by a query.

Linear attention (Katharopoulos et al. 2020, arXiv:2006.16236) with a decay (Mamba-2: Dao & Gu 2024, arXiv:2405.21060), and with the delta
rule, which replaces what the state holds of a key (Yang et al. 2024, arXiv:2412.06464).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

CHUNK = 64  # tokens that are compared pair by pair; the state goes from chunk to chunk


@dataclass(frozen=True)
class Flow:
    """What the tokens of rows do to the states, in float32 or wider.

    q, k: (b, h, s, k); v: (b, h, s, v); decay: (b, h, s), the logarithm of what is left of the state, at most 0; beta: (b, h, s), which
    part of what the state holds of k is replaced by v; None: v is added, and nothing is replaced.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None = None

    def without(self, padding: Tensor) -> "Flow":
        """Returns one whose padding neither writes nor fades.  padding: (b, s)."""
        hidden = padding.unsqueeze(1)  # (b, 1, s)
        k, decay = self.k.masked_fill(hidden.unsqueeze(-1), 0), self.decay.masked_fill(hidden, 0)
        v, beta = self.v.masked_fill(hidden.unsqueeze(-1), 0), None if self.beta is None else self.beta.masked_fill(hidden, 0)
        return replace(self, k=k, v=v, decay=decay, beta=beta)

    def part(self, start: int, stop: int) -> "Flow":
        """Returns that of the tokens start..stop-1."""
        q, k, v = (each[:, :, start:stop] for each in (self.q, self.k, self.v))
        return Flow(q, k, v, self.decay[:, :, start:stop], None if self.beta is None else self.beta[:, :, start:stop])

    def empty(self) -> Tensor:
        """Returns the state before the first token, (b, h, k, v)."""
        return self.v.new_zeros(*self.k.shape[:2], self.k.shape[-1], self.v.shape[-1])


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
        state = state * flow.decay[:, :, t].exp()[..., None, None]
        if flow.beta is not None:
            v = flow.beta[:, :, t, None] * (v - _read(state, k))
        state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
        out.append(_read(state, flow.q[:, :, t]))
        states.append(state)
    return torch.stack(out, dim=2), states


def chunked(flow: Flow, state: Tensor, documents: Tensor | None = None, size: int = CHUNK) -> tuple[Tensor, Tensor]:
    """The same by matrix products: pairs within a chunk, and a state from chunk to chunk.  Returns (b, h, s, v) and the last state.

    No factor is above 1, since only differences of sums of decays are raised. What the delta rule writes in a chunk solves a triangular
    system, (I + A) new = beta (v - what the state before the chunk holds of k), A_ij = beta_i decay_ij k_i k_j for j < i.
    """
    s = flow.q.shape[2]
    flow, documents = _filled(flow, documents, -s % size)
    q, k, v, faded = (each.unflatten(2, (-1, size)) for each in (flow.q, flow.k, flow.v, flow.decay))  # (b, h, s, ..) -> (b, h, n, c, ..)
    faded = faded.cumsum(-1)
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    pairs = (faded.unsqueeze(-1) - faded.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    enters, leaves = faded.exp(), (faded[..., -1:] - faded).exp()
    if documents is not None:
        of = documents.unflatten(1, (-1, size)).unsqueeze(1)  # (b, s) -> (b, 1, n, c)
        before = torch.cat([of[:, :, :1, :1], of[:, :, :-1, -1:]], dim=2)
        pairs = pairs * (of.unsqueeze(-1) == of.unsqueeze(-2))
        enters, leaves = enters * (of == before), leaves * (of == of[..., -1:])
    scores, into, out_of = (q @ k.mT) * pairs, (k * leaves.unsqueeze(-1)).mT, q * enters.unsqueeze(-1)
    held = None
    if flow.beta is not None:
        beta = flow.beta.unflatten(2, (-1, size)).unsqueeze(-1)
        system = ((beta * k) @ k.mT * pairs).tril(-1)  # the diagonal is taken to be 1
        right = torch.cat([beta * v, beta * k * enters.unsqueeze(-1)], dim=-1)
        v, held = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], dim=-1)
    out = []
    for n in range(q.shape[2]):
        new = v[:, :, n] if held is None else v[:, :, n] - held[:, :, n] @ state
        out.append(out_of[:, :, n] @ state + scores[:, :, n] @ new)
        state = enters[:, :, n, -1, None, None] * state + into[:, :, n] @ new
    return torch.stack(out, dim=2).flatten(2, 3)[:, :, :s], state


def _filled(flow: Flow, documents: Tensor | None, n: int) -> tuple[Flow, Tensor | None]:
    """With n further tokens that write nothing, of the document of the last one."""
    if not n:
        return flow, documents
    pad = torch.nn.functional.pad
    q, k, v = (pad(each, (0, 0, 0, n)) for each in (flow.q, flow.k, flow.v))
    filled = Flow(q, k, v, pad(flow.decay, (0, n)), None if flow.beta is None else pad(flow.beta, (0, n)))
    return filled, None if documents is None else torch.cat([documents, documents[:, -1:].expand(-1, n)], dim=1)


def _read(state: Tensor, q: Tensor) -> Tensor:
    """(b, h, k, v), (b, h, k) -> (b, h, v)."""
    return (state * q.unsqueeze(-1)).sum(-2)
