"""The gated delta rule: a matrix state that decays, and in which the old value of a key is replaced by the token's value.

Yang et al. 2024, arXiv:2412.06464; in three of four layers of Qwen3-Next, OLMo Hybrid and, with a decay per channel, Kimi Linear.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.linear import Linear
from lm.nn.mixers.base import Mixer
from lm.nn.mixers.heads import Heads, HeadsConfig, low_rank
from lm.nn.norm import NormConfig
from lm.ops.recurrence.matrix import CHUNK, SMALL_CHUNK, Flow, by_head

_EPS = 1e-6  # added to the square of a query's or key's length


class GatedDeltaConfig(HeadsConfig):
    """S = a S; S = S + b k (v - S^T k)^T; o(norm(S^T q) * silu(gate)), with a and b of each token and head, q and k of length 1."""

    kind: Literal["gated_delta"] = "gated_delta"
    negative: bool = False
    """b is up to 2 and not 1, so that a state may turn round (Grazzi et al. 2024, arXiv:2411.12537; OLMo Hybrid)."""
    channels: bool = False
    """a is of each channel of k, and the gate's silu a sigmoid; both come of matrices of rank v_dim (Kimi Delta Attention: Kimi Team 2025,
    arXiv:2510.26692)."""

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return GatedDelta(self, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        """Counts the convolution, reading the old value of the key, writing the new one, and reading with the query."""
        qk, v = self.widths
        return 2 * self.kernel * (2 * qk + v) + 6 * self.n_heads * self.k_dim * self.v_dim

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts inputs of the convolution and of the operations behind it, both forms of q, k and v, the triangular system and the
        scores of a chunk, and a token's share of a chunk's state."""
        qk, v = self.widths
        size, pairs = (SMALL_CHUNK, SMALL_CHUNK * (3 * self.k_dim + 2)) if self.channels else (CHUNK, 5 * CHUNK)
        state = self.n_heads * self.k_dim * self.v_dim // size
        chunk = self.n_heads * (pairs + 5 * self.k_dim + 4 * self.v_dim)
        return Activations(chunk + 2 * state + 2 * qk + 2 * v, 3 * (2 * qk + v) + 3 * v)


class GatedDelta(Heads):
    """Decay, b and gate come from the layer's input, not from the convolved one."""

    kind = "gated_delta"

    def __init__(self, cfg: GatedDeltaConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, d_model, layer)
        self.cfg = cfg
        rates = cfg.n_heads
        self.rate: nn.Module = Linear(d_model, rates, bias=False)
        if cfg.channels:
            rates, self.squash = cfg.n_heads * cfg.k_dim, torch.sigmoid
            self.rate, self.gate = (low_rank(d_model, cfg.v_dim, width) for width in (rates, cfg.widths[1]))
        self.beta = Linear(d_model, cfg.n_heads, bias=False)
        self.fade, self.step = nn.Parameter(torch.empty(cfg.n_heads)), nn.Parameter(torch.empty(rates))

    def rates(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.rate(x), self.beta(x)

    def flow(self, u: Tensor, rates: tuple[Tensor, ...]) -> Flow:
        (q, k, v), (rate, beta) = self.split(u), rates
        _, decay = self.faded(rate)
        beta = by_head(beta, self.cfg.n_heads).sigmoid() * (2 if self.cfg.negative else 1)
        return Flow(_unit(q) * self.cfg.k_dim**-0.5, _unit(k), v, decay, beta)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
