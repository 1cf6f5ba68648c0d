"""Layers with fewer and larger operations, for decoding. Each computes what the layer that it replaces does, up to rounding."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lm.nn.block import Block
from lm.nn.context import Context
from lm.nn.ffn.mlp import GatedMLP
from lm.nn.linear import PLAIN
from lm.nn.mixers.grouped import GQA
from lm.nn.norm import BareRMSNorm, Branch, PreNorm
from lm.nn.position.base import Angles, Position
from lm.nn.position.rope import Rope
from lm.ops.attention.mask import Mask
from lm.ops.precision import wide

Hold = Callable[[Tensor, Tensor | None], nn.Module]
"""Makes a module that multiplies by a matrix, from that matrix and its bias."""


def stacked(linears: Sequence[nn.Linear], hold: Hold, order: Tensor | None = None) -> nn.Module:
    """Returns one layer for several linear ones with the same input; its outputs are theirs side by side, or those taken in `order`."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    return hold(weight, bias) if order is None else hold(weight[order], None if bias is None else bias[order])


class QuickRMSNorm(nn.Module):
    """x / sqrt(|x|^2 + d eps) * sqrt(d) weight, in float32 or wider: half as many operations as torch's own on a CPU."""

    def __init__(self, gain: Tensor, eps: float) -> None:
        """gain: (.., d); leading dimensions are as in the input, for heads that have gains of their own."""
        super().__init__()
        d = gain.shape[-1]
        self.gain = wide(gain) * math.sqrt(d)
        self.floor = self.gain.new_tensor(math.sqrt(d * eps))

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self.floor.dtype)
        out = (x * self.gain).div_(length.hypot_(self.floor))
        return out if out.dtype is x.dtype else out.to(x.dtype)

    __call__ = forward


class FusedBlock(Block):
    """x = x + mixer(norm(x)); x = x + ffn(norm(x)), without the steps of a Block that do nothing in decoding."""

    def __init__(self, of: Block) -> None:
        """of: a block whose layers have been fused already."""
        nn.Module.__init__(self)
        for name, child in of.named_children():
            self.add_module(name, child)
        self.slot = of.slot
        sublayers = (of.slot, f"{of.slot}_residual.norm"), ("ffn", "ffn_residual.norm")
        self.steps = [(of.get_submodule(norm), of.get_submodule(name)) for name, norm in sublayers]

    @staticmethod
    def fits(of: Block) -> bool:
        """Returns whether the block is pre-norm, and adds the outputs of its sublayers unscaled."""
        residuals = of.get_submodule(f"{of.slot}_residual"), of.ffn_residual
        return all(type(each) is PreNorm and type(each.branch) is Branch and each.branch.scale == 1.0 for each in residuals)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        for norm, sublayer in self.steps:
            x = x + sublayer(norm(x), ctx)
        return x


class FusedMLP(GatedMLP):
    """A gated MLP whose gate and up projections are one matrix."""

    def __init__(self, of: GatedMLP, hold: Hold) -> None:
        nn.Module.__init__(self)
        self.gate_up, self.down, self.act, self.combine = stacked([of.gate, of.up], hold), of.down, of.act, of.combine
        self.inner_norm = of.inner_norm

    @staticmethod
    def fits(of: GatedMLP) -> bool:
        """Returns whether there is no adapter beside the matrices."""
        return all(type(linear) in PLAIN for linear in (of.gate, of.up))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(self.inner_norm(self.combine(gate, up)))
        return out


class QuickRope(Rope):
    """Rotates pairs of neighbouring dimensions as complex numbers, in place: one operation instead of ten. `FusedGQA` orders the dimensions
    of queries and keys alike so that pairs are neighbours, which leaves the scores as they are."""

    def __init__(self, of: Rope) -> None:
        nn.Module.__init__(self)
        self.cfg, self.rotary_dim, self.amplitude, self.window = of.cfg, of.rotary_dim, of.amplitude, of.window
        self.rates, self.local, self.local_amplitude, self._here = of.rates, of.local, of.local_amplitude, (of.rates, of.local)

    @staticmethod
    def order(of: Rope, head_dim: int) -> Tensor:
        """Returns for each dimension of a head here its place in a head of `of`, (c,)."""
        r = 0 if of.cfg.interleaved else of.rotary_dim
        return torch.cat([torch.arange(r).view(2, -1).t().flatten(), torch.arange(r, head_dim)])

    def angles(self, positions: Tensor) -> Angles | None:
        """Returns cos + i sin, (b, 1, s, r/2), of layers without and of layers with a window; while tracing, the angles of `Rope`."""
        found = super().angles(positions)
        assert found is not None
        if torch.compiler.is_compiling():
            return found
        whole, local = found[:2], found[-2:]
        turns = torch.complex(*whole)
        return turns, turns if self.local is None else torch.complex(*local)

    def rotate(self, x: Tensor, angles: Angles | None, layer: int) -> Tensor:
        assert angles is not None
        if not self.rotates(layer):
            return x
        local, pairs = self.window(layer) is not None, x[..., : self.rotary_dim].unflatten(-1, (-1, 2))
        if torch.compiler.is_compiling():  # a compiler knows no complex numbers
            cos, sin = self.of_layer(angles, layer)
            a, b = pairs.unbind(-1)
            turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
            return torch.cat([turned.to(x.dtype), x[..., self.rotary_dim :]], -1)
        turns = angles[local]
        if x.dtype.itemsize < 4:
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turns))
        else:
            torch.view_as_complex(pairs).mul_(turns)
        return x


class FusedGQA(GQA):
    """GQA whose queries, keys and values come from one matrix and stay in one tensor: queries and keys are normed and rotated there
    together, and keys and values are cached together."""

    def __init__(self, of: GQA, hold: Hold, rope: Rope | None) -> None:
        """rope: the model's Rope, which a QuickRope will replace; None: the model keeps its position encoding."""
        nn.Module.__init__(self)
        self.layer, self.head_dim, self.how, self.how_in_eval = of.layer, of.head_dim, of.how, of.how_in_eval
        self.sinks, self.attend, self.o, self.gate, self.said = of.sinks, of.attend, of.o, of.gate, of.extra_repr()
        self.inner_norm = of.inner_norm
        self.heads = [linear.out_features // of.head_dim for linear in (of.q, of.k, of.v)]
        self.qk, self.norm = sum(self.heads[:2]), None
        order, rows = torch.arange(of.head_dim), torch.arange(sum(self.heads) * of.head_dim).view(-1, of.head_dim)
        if rope is not None:
            order = QuickRope.order(rope, of.head_dim)
            rows[: self.qk] = rows[: self.qk, order]
        self.qkv = stacked([of.q, of.k, of.v], hold, rows.flatten())
        if isinstance(of.q_norm, BareRMSNorm) and isinstance(of.k_norm, BareRMSNorm):
            gains = [norm.gain()[order].expand(heads, 1, -1) for norm, heads in zip((of.q_norm, of.k_norm), self.heads, strict=False)]
            self.norm = QuickRMSNorm(torch.cat(gains).to(of.q.weight.device), of.q_norm.eps)  # (h+g, 1, c)

    @staticmethod
    def fits(of: GQA) -> bool:
        """Returns whether queries and keys have no norms, or RMS norms of each head; the head dimension is even, as pairs need; and there
        is no adapter beside the matrices."""
        normed = isinstance(of.q_norm, nn.Identity) or (isinstance(of.q_norm, BareRMSNorm) and not of.norm_full)
        return normed and of.head_dim % 2 == 0 and all(type(linear) in PLAIN for linear in (of.q, of.k, of.v))

    def extra_repr(self) -> str:
        return self.said

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (b, s, (h+2g)*c) -> (b, h+2g, s, c)
        qk = turning = heads[:, : self.qk]
        if self.norm is not None:
            turning = self.norm(qk)
        turning = ctx.position.rotate(turning, ctx.angles, self.layer)
        if turning is not qk:
            qk.copy_(turning)
        return self.output(x, self.read(heads[:, : self.heads[0]], heads[:, self.heads[0] :], ctx))

    def read(self, q: Tensor, kept: Tensor, ctx: Context) -> Tensor:
        """Returns the attention of the queries to the keys and values in the cache and to these, which are appended to it.  q: (b, h, s,
        c); kept: k and v, (b, 2g, s, c)."""
        if ctx.cache is not None:
            [kept] = ctx.cache.append(self.layer, kept)  # (b, 2g, k, c)
        k, v = kept.chunk(2, dim=1)
        return self.weighted(q, k, v, ctx.keys(self.layer), ctx.position)

    def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, position: Position | None) -> Tensor:
        """As in GQA; but queries of one token that share a key head are passed as several queries of one head, so that no keys are copied,
        as torch's kernel does in bfloat16."""
        if q.shape[2] > 1 or not mask.cached or self.bias(mask, position) is not None or self.sinks is not None:
            return super().weighted(q, k, v, mask, position)
        shared = q.squeeze(2).unflatten(1, (k.shape[1], -1))  # (b, h, 1, c) -> (b, g, h/g, c)
        return self.attend(shared, k, v, mask, None, self.how_in_eval, None).flatten(1, 2).unsqueeze(2)  # -> (b, h, 1, c)
