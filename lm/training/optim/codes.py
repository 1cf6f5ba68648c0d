"""Numbers in 8 bits: in blocks with a scale each, a code for the nearest of 256 values.  Dettmers et al. 2021, arXiv:2110.02861."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
CODED_BYTES = 1 + 4 / BLOCK  # of an element: its code, and its part of the scale
_LEAST, _MOST = 2.0**-100, 2.0**100  # sizes of a scale: between them no value times the scale is infinite, or a denormal number
_KEYS = 1 << 16  # ways a float32 begins: sign, exponent and 7 bits


def dynamic_map(signed: bool) -> list[float]:
    """The values in rising order: 0, 1, and the middles of equal parts of each decade from 1e-7 to 1, of which the next has twice as many.

    Section 1.3 and appendix F. Without a sign each decade has twice as many parts again. There is no -1.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        parts = 2 ** (decade + (not signed))
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        found += [*middles, *(-x for x in middles)] if signed else middles
    return sorted(found)


class Tables(NamedTuple):
    """What encodes and decodes on a device."""

    values: Tensor  # (256)
    bounds: Tensor  # (256) above a code's, the next one is nearer
    first: Tensor  # (65536) the code of the least number that begins so


@cache
def tables(signed: bool, device: torch.device) -> Tables:
    """signed: whether there are numbers below 0. Where there are none, one above 0 does not become 0 (the paper's may): a weight whose
    square is lost would step by momentum / eps.
    """
    values = torch.tensor(dynamic_map(signed), dtype=torch.float32, device="cpu")
    middles = (values[1:] + values[:-1]) / 2
    if not signed:
        middles[0] = 0
    keys = torch.arange(_KEYS, dtype=torch.int32, device="cpu") - _KEYS // 2
    least = (keys << 16) | ((keys < 0) * 0xFFFF).int()  # below 0 the bits behind a key make the number smaller
    first = torch.bucketize(least.view(torch.float32), middles, out_int32=True)
    bounds = torch.cat([middles, middles.new_full((1,), torch.inf)])
    return Tables(values.to(device), bounds.to(device), first.to(device))


class Coded(NamedTuple):
    """Blocks of a tensor. What was decoded has the same codes and scales again, bit for bit.

    That is so because the element of the largest size gives the scale of a block with its sign: it becomes 1, and is kept as it is.
    """

    codes: Tensor  # (n, 256) uint8
    scales: Tensor  # (n, 1) float32
    signed: bool

    def decode(self) -> Tensor:
        """Returns x, (n, 256) float32."""
        values = tables(self.signed, self.codes.device).values
        return values.index_select(0, self.codes.view(-1).int()).view(self.codes.shape) * self.scales

    def encode_(self, x: Tensor) -> None:
        """Writes over codes and scales what they are of x, (n, 256) float32."""
        new = encoded(x, self.signed)
        self.codes.copy_(new.codes)
        self.scales.copy_(new.scales)


def encoded(x: Tensor, signed: bool) -> Coded:
    """Returns the blocks of x, (n, 256) float32.

    As `torch.bucketize` by the bounds, which on a CPU takes 15 times as long: no two bounds begin alike, so one comparison is left.
    """
    _, bounds, first = tables(signed, x.device)
    high, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    size = torch.maximum(high, -low).clamp(_LEAST, _MOST)
    scales = torch.where(low < -high.clamp(min=_LEAST), -size, size)
    parts = (x / scales).view(-1)
    least = first.index_select(0, (parts.view(torch.int32) >> 16) + _KEYS // 2)
    codes = least + (parts > bounds.index_select(0, least))
    return Coded(codes.to(torch.uint8).view(x.shape), scales, signed)


def blocks(x: Tensor) -> Tensor:
    """(elements) -> (n, 256), with zeros behind the last element."""
    return F.pad(x, (0, -len(x) % BLOCK)).view(-(-len(x) // BLOCK), BLOCK)
