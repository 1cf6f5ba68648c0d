"""Gated linear attention: a matrix state that decays per channel, per head or by a constant, and to which every token adds k v^T.

Yang et al. 2023, arXiv:2312.06635. A constant decay gives what RetNet (Sun et al. 2023, arXiv:2307.08621) and, with other constants,
lightning attention (Qin et al. 2024, arXiv:2401.04658) compute, positions aside.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.activation_memory import Activations
from lm.nn.linear import Linear
from lm.nn.mixers.base import Mixer
from lm.nn.mixers.heads import Heads, HeadsConfig, low_rank
from lm.nn.norm import NormConfig
from lm.ops.recurrence.matrix import CHUNK, SMALL_CHUNK, Flow, by_head
from lm.schema import MOST

_SLOWNESS = 16  # tokens over which a state decays by the sigmoid as a factor; the paper's tau


class GLAConfig(HeadsConfig):
    """S = a S + k v^T; o(norm(S^T q) * silu(gate)), with a of each token and channel of k.

    q, k and v go through the short convolution of the other kinds, which the paper's do not.
    """

    kind: Literal["gla"] = "gla"
    decay: Literal["channel", "head", "constant"] = "channel"
    """What fades by itself: each channel of a key, or each head, as a token says (sigmoid(W x)^(1/16)); or each head by 1 - 2^(-5 - head),
    as in RetNet."""
    rank: int = Field(16, gt=0, le=MOST)
    """Rank of the matrix W of channels."""

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return GLA(self, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """Counts the convolution, and writing to and reading from the state."""
        qk, v = self.widths
        return 2 * self.kernel * (2 * qk + v) + 4 * self.n_heads * self.k_dim * self.v_dim

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts inputs of the convolution and of the operations behind it, q, k and v by head, decays and scores of a chunk, and a
        token's share of a chunk's state."""
        qk, v = self.widths
        size = SMALL_CHUNK if self.decay == "channel" else CHUNK
        pairs = SMALL_CHUNK * (2 * self.k_dim + 1) + 2 * self.k_dim if self.decay == "channel" else 3 * CHUNK
        state = self.n_heads * self.k_dim * self.v_dim // size
        return Activations(self.n_heads * (pairs + 4 * self.k_dim + 2 * self.v_dim) + 2 * state + 2 * v, 3 * (2 * qk + v) + 3 * v)


class GLA(Heads):
    """Decay and gate come from the layer's input, not from the convolved one."""

    kind = "gla"

    def __init__(self, cfg: GLAConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, d_model, layer)
        self.cfg = cfg
        self.rate: nn.Module | None = None
        if cfg.decay == "channel":
            self.rate = low_rank(d_model, cfg.rank, cfg.n_heads * cfg.k_dim, bias=True)
        elif cfg.decay == "head":
            self.rate = Linear(d_model, cfg.n_heads)

    def rates(self, x: Tensor) -> tuple[Tensor, ...]:
        return () if self.rate is None else (self.rate(x),)

    def flow(self, u: Tensor, rates: tuple[Tensor, ...]) -> Flow:
        q, k, v = self.split(u)
        if rates:
            decay = F.logsigmoid(by_head(rates[0], self.cfg.n_heads)) / _SLOWNESS
        else:
            heads = torch.arange(self.cfg.n_heads, device=q.device, dtype=q.dtype)
            decay = torch.log1p(-torch.exp2(-5 - heads))[:, None, None].expand(*q.shape[:3], 1)  # (h, 1, 1) -> (b, h, s, 1)
        return Flow(q * self.cfg.k_dim**-0.5, k, v, decay)
