"""softmax(q k^T) v, as a readable reference and as fused kernels that agree with it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.nn.mask import Mask


@dataclass(frozen=True)
class Scoring:
    """How scores become weights: score = softcap(scale * q.k) + bias; dropout is on the weights."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


class Attend(Protocol):
    """q: (b, h, q, c); k, v: (b, g, k, c) with g dividing h; bias broadcasts to (b, h, q, k). Returns (b, h, q, c)."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, how: Scoring) -> Tensor: ...


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, how: Scoring) -> Tensor:
    """Scores and softmax in float32; a query that sees no key gives zeros.  Vaswani et al. 2017, arXiv:1706.03762, eq. 1."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)  # (b, g, k, c) -> (b, h, k, c)
    scores = (q.float() @ k.float().transpose(-1, -2)) * how.scale  # (b, h, q, k)
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if bias is not None:
        scores = scores + bias
    allowed = mask.allowed(how.window)
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return F.dropout(weights, how.dropout).to(v.dtype) @ v  # (b, h, q, k) -> (b, h, q, c)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, how: Scoring) -> Tensor:
    """torch's fused kernels. Only an explicit mask can hide every key of a query, and such rows are set to zero."""
    gqa = q.shape[1] != k.shape[1]
    if bias is None and mask.is_plain_causal(how.window):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=how.dropout, scale=how.scale, enable_gqa=gqa)
    allowed = mask.allowed(how.window)
    shown = allowed if bias is None else bias.to(q.dtype).masked_fill(~allowed, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=shown, dropout_p=how.dropout, scale=how.scale, enable_gqa=gqa)
    return out.masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def choose(device: torch.device, head_dim: int, softcap: float | None, dropout: float) -> tuple[Attend, str]:
    """The backend on this device for these options, and why."""
    plain, why = (sdpa, "sdpa: fused") if softcap is None else (reference, "reference: fused kernels have no soft-cap")
    if device.type != "cuda":
        return plain, why
    from lm.nn.flex import compiled_flex, obstacle

    reason = obstacle(device, head_dim, dropout)
    if reason is not None:
        return plain, f"{why}; not flex: {reason}"
    return compiled_flex(), "flex: windows, documents and soft-cap in one kernel; sdpa for plain rows, and with a cache"
