"""The base of mixers whose state is a matrix: the short convolution of their inputs, the recurrence, and the cache of both."""

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.nn.context import Context
from lm.nn.init import InitContext, by_inputs, ones
from lm.nn.mixers.base import Mixer
from lm.ops.attention.mask import Mask
from lm.ops.cache.cache import Cache
from lm.ops.precision import wide, without_autocast
from lm.ops.recurrence.convolve import convolved
from lm.ops.recurrence.kernels import fastest
from lm.ops.recurrence.matrix import Flow, by_head, reference


def fading(shape: torch.Size, init: InitContext) -> Tensor:
    """log U(1, 16): the logarithm of a head's decay rate, which each token's step multiplies.  Dao & Gu 2024, arXiv:2405.21060."""
    return torch.empty(shape).uniform_(1, 16, generator=init.source).log()


def steps(shape: torch.Size, init: InitContext) -> Tensor:
    """softplus^-1(dt) of a step dt that is log-uniform between 0.001 and 0.1.  Gu & Dao 2023, arXiv:2312.00752, section 3.6."""
    dt = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=init.source).exp()
    return dt + torch.log(-torch.expm1(-dt))


class Scan(Mixer):
    """A subclass defines the convolution's inputs, the state update, and the output from what queries read.  channels: convolved ones."""

    initializers = {"kernel": by_inputs, "fade": fading, "step": steps, "norm": ones}
    kind: ClassVar[str]

    fade: nn.Parameter  # of subclasses that call `faded`
    step: nn.Parameter

    def __init__(self, layer: int, channels: int, kernel: int, bias: bool) -> None:
        super().__init__(layer)
        self.kernel = nn.Parameter(torch.empty(channels, kernel))
        self.kernel_bias = nn.Parameter(torch.empty(channels)) if bias else None

    @abstractmethod
    def inputs(self, x: Tensor) -> Tensor:
        """(b, s, d) -> (b, s, channels): the input of the convolution."""

    @abstractmethod
    def rates(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the inputs of the state update that are not convolved, (b, s, ..) each, the decay's first.  x: (b, s, d)."""

    @abstractmethod
    def flow(self, u: Tensor, rates: tuple[Tensor, ...]) -> Flow:
        """Returns the state updates of all tokens.  u: (b, s, channels), the output of the convolution."""

    @abstractmethod
    def output(self, x: Tensor, heads: Tensor, flow: Flow) -> Tensor:
        """(b, s, h, v) -> (b, s, d).  heads: what the queries read from the state."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        ctx.mask.require_causal(f"recurrent={self.kind}")
        padding = ctx.mask.once("padding", lambda: _padding(ctx.mask))
        u, rates = self.inputs(x), self.rates(x)
        mixed, ends = convolved(u, self.kernel, ctx.mask, ctx.cache, self.layer)
        mixed = F.silu(mixed if self.kernel_bias is None else mixed + self.kernel_bias.to(u.dtype))
        with without_autocast(x.device):  # sums over a row are kept in float32
            flow = self.flow(mixed, rates)
            flow = flow if padding is None else flow.without(padding)
            if ctx.cache is None:
                documents = ctx.mask.once("documents of states", lambda: _documents(ctx.mask, len(x)))
                heads, _ = fastest(flow, u.dtype, ctx.mask, documents=documents)
            else:
                heads = self._continued(flow, u.dtype, ctx.mask, ends, ctx.cache)
        return self.output(x, heads.transpose(1, 2).to(x.dtype), flow)

    def _continued(self, flow: Flow, dtype: torch.dtype, mask: Mask, ends: Tensor, cache: Cache) -> Tensor:
        """Runs all but the last tokens in chunks, and the last ones one by one, since the cache keeps the state after each of these."""
        s, state = flow.q.shape[2], cache.state(self.layer)[1].to(flow.v.dtype)
        begun = s - ends.shape[1]
        first, state = fastest(flow.part(0, begun), dtype, mask, state) if begun else (flow.v[:, :, :0], state)
        last, states = reference(flow.part(begun, s), state)
        cache.advance(self.layer, ends, torch.stack(states, dim=1))
        return torch.cat([first, last], dim=2)

    def faded(self, rate: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
        """Returns the step dt = softplus(rate + step), or floor where that is more, and the log decay -exp(fade) dt, both (b, h, s, 1 or
        k).  rate: (b, s, h or h*k)."""
        dt = F.softplus(by_head(wide(rate) + wide(self.step), len(self.fade)))
        dt = dt.clamp(min=floor) if floor else dt
        return dt, -wide(self.fade).exp()[:, None, None] * dt


def _padding(mask: Mask) -> Tensor | None:
    return None if mask.square or not mask.padded else mask.q_positions < 0


def _documents(mask: Mask, rows: int) -> Tensor | None:
    """Returns the document of each token, with padding as a document of its own; None where each row is one document."""
    if mask.q_documents is None:
        return None
    return torch.where(mask.q_positions >= 0, mask.q_documents.long(), -1).expand(rows, -1)
