"""softmax(q k^T) v, as a readable reference and as fused kernels that agree with it."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.ops.attention.blockwise import Blockwise, faster
from lm.ops.attention.mask import Mask
from lm.ops.precision import without_autocast


@dataclass(frozen=True)
class Scoring:
    """How scores become weights: score = softcap(scale * q.k) + bias; dropout is on the weights."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    first: int = 0  # tokens at the start of a document that are seen beyond the window
    chunked: bool = False  # the window is a token's chunk of so many tokens, counted from the start of its document

    @property
    def sight(self) -> tuple[int | None, int, bool]:
        """Returns window, first and chunked, by which a mask is asked."""
        return self.window, self.first, self.chunked


class Attend(Protocol):
    """q: (b, h, q, c); k: (b, g, k, c), v: (b, g, k, w) with g dividing h; bias broadcasts to (b, h, q, k). Returns (b, h, q, w).

    sinks (h,): one more score per head that takes its part of the softmax and has no value (gpt-oss).
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, how: Scoring, sinks: Tensor | None = None
    ) -> Tensor: ...


@runtime_checkable
class Preparing(Protocol):
    """A backend that gives a mask a form of its own."""

    def prepare(self, mask: Mask, bias: Tensor | None, how: Scoring, rows: int) -> None: ...


def weights(q: Tensor, k: Tensor, mask: Mask, bias: Tensor | None, how: Scoring, sinks: Tensor | None = None) -> Tensor:
    """softmax(q k^T), (b, h, q, k), in float32; a query that sees no key has zeros, and with sinks a row adds up to less than 1."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # (b, g, k, c) -> (b, h, k, c)
    with without_autocast(q.device):
        scores = (q.float() @ k.float().transpose(-1, -2)) * how.scale  # (b, h, q, k)
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if bias is not None:
        scores = scores + bias
    allowed = mask.allowed(*how.sight)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)  # (b, h, q, k+1)
    return scores.softmax(-1)[..., : k.shape[2]].masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, how: Scoring, sinks: Tensor | None = None) -> Tensor:
    """Scores and softmax in float32; a query that sees no key gives zeros.  Vaswani et al. 2017, arXiv:1706.03762, eq. 1."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)  # (b, g, k, w) -> (b, h, k, w)
    return F.dropout(weights(q, k, mask, bias, how, sinks), how.dropout).to(v.dtype) @ v  # (b, h, q, k) -> (b, h, q, w)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, how: Scoring, sinks: Tensor | None = None) -> Tensor:
    """torch's fused kernels. A sink is one more key of zeros, whose score is its bias, and whose value is zero. On a CPU the gradient of
    that bias would have all scores written out, and a kernel of our own takes the sinks."""
    q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast a norm of the heads may have returned float32
    in_kernel = sinks is not None and v.device.type == "cpu" and not how.dropout and (bias is None or not bias.requires_grad)
    plain = mask.plain(how.window) if bias is None and (in_kernel or sinks is None) else None
    if plain is not None:
        return _fused(q, k, v, None, plain == "causal", how, sinks)
    shown = mask.additive(q.dtype, *how.sight)
    if bias is not None:
        shown = shown + bias.to(q.dtype)
    if sinks is not None and not in_kernel:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))  # (b, g, k, c) -> (b, g, k+1, c)
        sink = sinks.to(q.dtype)[:, None, None]
        shown = torch.cat([shown.expand(-1, len(sinks), -1, -1), sink.expand(len(shown), -1, shown.shape[2], 1)], dim=-1)
    out = _fused(q, k, v, shown, False, how, sinks if in_kernel else None)
    blind = mask.blind(*how.sight)
    return out if blind is None else out.masked_fill(blind, 0.0)


def _fused(q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None, causal: bool, how: Scoring, sinks: Tensor | None) -> Tensor:
    """shown: what is added to the scores. A CPU's kernel takes values as wide as keys alone, so that those of MLA get zeros."""
    width, wide = v.shape[-1], max(q.shape[-1], v.shape[-1])
    unequal = q.shape[-1] != width and v.device.type == "cpu" and not how.dropout
    if unequal and (q.shape[2] > 1 or v.dtype == torch.float32 or sinks is not None):  # in bf16, one query is slower with such copies
        q, k, v = (F.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v))
        return _fused(q, k, v, shown, causal, how, sinks)[..., :width]
    if sinks is not None or faster(q, k, v, shown, how.dropout):
        found: Tensor = Blockwise.apply(q, k, v, shown, sinks, causal, how.scale)
        return found
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, shown, dropout_p=how.dropout, is_causal=causal, scale=how.scale, enable_gqa=gqa)


def choose(device: torch.device, head_dim: int, how: Scoring, sinks: bool = False) -> Attend:
    """The backend on this device for these options."""
    mac = device.type == "mps"  # its fused kernel reads some views and long rows wrongly, silently (pytorch/pytorch#174861, #181133)
    plain = reference if how.softcap is not None or mac else sdpa  # fused kernels have no soft-cap
    if device.type != "cuda":
        return plain
    from lm.ops.attention.flex import compiled_flex, why_not_flex

    return compiled_flex() if why_not_flex(device, head_dim, how.dropout, sinks) is None else plain
