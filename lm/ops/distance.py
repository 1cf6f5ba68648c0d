"""What a distance of two tokens stands for: ALiBi's slopes, and rows of the tables of T5 and DeBERTa."""

import math

import torch
from torch import Tensor


def alibi_slopes(n_heads: int) -> list[float]:
    """(h,) 2^(-8i/h) for a power of two; else those of the power below, then every second one of the power above.

    Press et al. 2021, arXiv:2108.12409, section 3, and its code.
    """
    below = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    return slopes + [2 ** (-4 * i / below) for i in range(1, 2 * (n_heads - below), 2)]


def t5_buckets(distance: Tensor, n_buckets: int, max_distance: int, causal: bool) -> Tensor:
    """The bucket of key - query, of any shape: exact up to a half of the buckets, then logarithmic up to max_distance.

    Raffel et al. 2019, arXiv:1910.10683, section 2.1.
    """
    side = torch.zeros_like(distance)
    if causal:
        back = -distance.clamp(max=0)
    else:
        n_buckets //= 2
        side, back = (distance > 0).long() * n_buckets, distance.abs()
    exact = n_buckets // 2
    growth = torch.log(back.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (n_buckets - exact)
    far = (exact + growth.long()).clamp(max=n_buckets - 1)
    return side + torch.where(back < exact, back, far)


def signed_buckets(distance: Tensor, n: int, max_distance: int | None) -> Tensor:
    """The row of query - key, of any shape, in a table of 2 n: n for 0, behind it earlier keys. Exact up to n / 2, then logarithmic
    up to max_distance; None: all are exact. The first and the last row stand for all that is farther.

    He et al. 2020, arXiv:2006.03654, eq. 3, exact; He et al. 2021, arXiv:2111.09543, and its code for the logarithm.
    """
    if max_distance is not None:
        exact, back = n // 2, distance.abs()
        far = back.clamp_min(exact).float() / exact  # whatever the default dtype is
        last = far.new_full((), (max_distance - 1) / exact)  # of the same dtype, so that `growth` is a whole number there
        growth = torch.log(far) / torch.log(last) * (exact - 1)
        distance = torch.where(back <= exact, distance, distance.sign() * (exact + growth.ceil().long()))
    return (distance + n).clamp(0, 2 * n - 1)
