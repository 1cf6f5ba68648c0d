"""FlexAttention: windows, documents, padding, soft-cap and bias in one CUDA kernel that skips blocks with nothing to see.

Dong et al. 2024, arXiv:2412.05496. On CPU, where torch has it without a backward, only the tests use it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lm.ops.attention.attend import Scoring, reference, sdpa
from lm.ops.attention.mask import Mask
from lm.ops.compiling import expect_kinds, why_not_compiled

HEAD_DIMS = range(16, 129)  # narrower ones have no kernel; the backward of wider ones exceeds the shared memory of some cards
_BLOCK = 128  # queries or keys of which a block mask knows as one whether anything is seen


@dataclass(frozen=True)
class Flex:
    """The FlexAttention backend, given torch's two functions, compiled or eager. Cached decoding and, where sums may be in any
    order, plain rows go to faster kernels."""

    attention: Callable[..., Any]
    block_mask: Callable[..., Any]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, how: Scoring, sinks: Tensor | None = None
    ) -> Tensor:
        if not _serves(mask, bias, how):
            return (sdpa if how.softcap is None else reference)(q, k, v, mask, bias, how)
        blocks, s = self.blocks(mask, how, len(q), bias is None), q.shape[2]
        width = widened(s) if bias is None else s
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast a norm of the heads may have returned float32
        if width > s:
            q, k, v = (F.pad(x, (0, 0, 0, width - s)) for x in (q, k, v))  # (b, h, s, c) -> (b, h, width, c)
        out: Tensor = self.attention(q, k, v, score_mod(how, bias, q), blocks, how.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out[:, :, :s] if width > s else out

    def blocks(self, mask: Mask, how: Scoring, rows: int, wide: bool) -> Any:
        """Returns which blocks of keys a block of queries sees, built once per kind of window.  wide: of rows that are `widened`."""

        def build() -> Any:
            s, device = mask.q_positions.shape[1], mask.q_positions.device
            width = widened(s) if wide else s
            return self.block_mask(mask_mod(mask, how.window, rows, width, how.chunked), rows, None, width, width, device=device)

        return mask.once(("flex", how.window, how.chunked, wide), build)

    def prepare(self, mask: Mask, bias: Tensor | None, how: Scoring, rows: int) -> None:
        """Builds the blocks before a compiler sees the layer: where a compiled layer builds them, and is recomputed selectively, torch 2.11
        reads beyond its memory. Where none does, there are fewer kinds of layers to compile, too."""
        if _serves(mask, bias, how):
            self.blocks(mask, how, rows, bias is None)


def _serves(mask: Mask, bias: Tensor | None, how: Scoring) -> bool:
    """Returns whether FlexAttention computes this: keys of a cache, explicit masks and learned biases, whose gradient it would sum by one
    atomic addition per score, have other kernels. Plain rows have faster ones, whose backward adds in no fixed order."""
    if mask.cached or mask.explicit is not None or how.first > 0 or (bias is not None and bias.requires_grad):
        return False
    in_order = torch.are_deterministic_algorithms_enabled() and torch.is_grad_enabled()
    return in_order or how.softcap is not None or bias is not None or mask.plain(how.window) is None


def widened(s: int) -> int:
    """Returns 128, 192, 256, 384, 512, 768 or so on: s or the next of these, so that rows of all widths are compiled a few times. Blocks of
    padding are seen by nothing, and take no time."""
    width = _BLOCK
    while width < s:
        width += width // 2 if width & (width - 1) == 0 else width // 3
    return width


def mask_mod(mask: Mask, window: int | None, b: int, width: int, chunked: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Returns a function: whether query i of row r sees key j. One form for all self-attention, so that few variants are compiled."""

    def wide(x: Tensor, fill: int) -> Tensor:
        return F.pad(x, (0, width - x.shape[1]), value=fill).expand(b, -1).contiguous()  # (b or 1, s) -> (b, width)

    positions = wide(mask.q_positions, -1)
    documents = torch.zeros_like(positions) if mask.q_documents is None else wide(mask.q_documents, 0)
    causal = mask.causal
    prefix = None if mask.k_prefix is None else wide(mask.k_prefix, False)

    def sees(r: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = positions[r, i], positions[r, j]
        seen = (query >= 0) & (key >= 0) & (documents[r, i] == documents[r, j])
        if causal:
            seen = seen & (key <= query if prefix is None else (key <= query) | prefix[r, j])
        if window is None:
            return seen
        return seen & (query // window == key // window if chunked else (query - key).abs() < window)

    return sees


def score_mod(how: Scoring, bias: Tensor | None, q: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """Returns a function that applies soft-cap, then bias, to a scaled score; None where there is neither."""
    if how.softcap is None and bias is None:
        return None
    softcap = how.softcap
    added = None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], -1)

    def change(score: Tensor, r: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if added is None else score + added[r, h, i, j]

    return change


def why_not_flex(device: torch.device, head_dim: int, dropout: float, sinks: bool = False) -> str | None:
    """Why FlexAttention cannot be used on this CUDA device; None where it can."""
    if dropout or sinks:
        return f"it has no {'dropout' if dropout else 'sinks'}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim} is outside {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    return why_not_compiled(device)


@cache
def compiled_flex() -> Flex:
    """Returns the backend with both functions compiled, at their first call with each shape of inputs."""
    expect_kinds()
    return Flex(torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False))
