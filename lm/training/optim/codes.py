"""Block-wise 8-bit numbers: each block has a scale, each element the code of the nearest of 256 values.  Dettmers et al. 2021,
arXiv:2110.02861."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
CODED_BYTES = 1 + 4 / BLOCK  # per element: its code, and its share of the block's scale
_LEAST, _MOST = 2.0**-100, 2.0**100  # limits of a scale's size: within them no value times the scale is infinite or denormal
_KEYS = 1 << 16  # values of a float32's first 16 bits: sign, exponent and 7 bits of the mantissa


def dynamic_map(signed: bool) -> list[float]:
    """Returns the 256 values in rising order: 0, 1, and the midpoints of equal parts of each decade from 1e-7 to 1. Each decade has twice
    as many parts as the one below it.

    Section 1.3 and appendix F of the paper. Without a sign each decade has twice as many parts again. There is no -1.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        parts = 2 ** (decade + (not signed))
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        found += [*middles, *(-x for x in middles)] if signed else middles
    return sorted(found)


class Tables(NamedTuple):
    """Lookup tables for encoding and decoding on a device."""

    values: Tensor  # (256)
    bounds: Tensor  # (256) above a code's bound the next value is nearer
    first: Tensor  # (65536) the code of the smallest number with these first 16 bits


@cache
def tables(signed: bool, device: torch.device) -> Tables:
    """Returns the tables of a device.  signed: whether numbers may be below 0. Unsigned, no number above 0 is coded as 0 (the paper's may
    be): a weight whose second moment became 0 would step by momentum / eps.
    """
    values = torch.tensor(dynamic_map(signed), dtype=torch.float32, device="cpu")
    middles = (values[1:] + values[:-1]) / 2
    if not signed:
        middles[0] = 0
    keys = torch.arange(_KEYS, dtype=torch.int32, device="cpu") - _KEYS // 2
    least = (keys << 16) | ((keys < 0) * 0xFFFF).int()  # below 0 set low bits make a number smaller
    first = torch.bucketize(least.view(torch.float32), middles, out_int32=True)
    bounds = torch.cat([middles, middles.new_full((1,), torch.inf)])
    return Tables(values.to(device), bounds.to(device), first.to(device))


class Coded(NamedTuple):
    """Encoded blocks of a tensor. Encoding a decoded tensor gives the same codes and scales again, bit for bit.

    This holds because a block's scale is its element of the largest size, with its sign: that element is coded as 1, without error.
    """

    codes: Tensor  # (n, 256) uint8
    scales: Tensor  # (n, 1) float32
    signed: bool

    def decode(self) -> Tensor:
        """Returns the decoded blocks, (n, 256) float32."""
        values = tables(self.signed, self.codes.device).values
        return values.index_select(0, self.codes.view(-1).int()).view(self.codes.shape) * self.scales

    def encode_(self, x: Tensor) -> None:
        """Overwrites codes and scales with those of x, (n, 256) float32."""
        new = encoded(x, self.signed)
        self.codes.copy_(new.codes)
        self.scales.copy_(new.scales)


def encoded(x: Tensor, signed: bool) -> Coded:
    """Returns the encoded blocks of x, (n, 256) float32.

    Gives what `torch.bucketize` by the bounds gives, which takes 15 times as long on a CPU: no two bounds share their first 16 bits, so
    after the lookup by these one comparison is left.
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
    """Returns x, (elements,), as blocks of (n, 256), padded with zeros at the end."""
    return F.pad(x, (0, -len(x) % BLOCK)).view(-(-len(x) // BLOCK), BLOCK)
