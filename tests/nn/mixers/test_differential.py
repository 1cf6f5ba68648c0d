"""Differential attention against the paper's formula."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.nn.context import Context
from lm.nn.mixers.differential import Differential
from lm.nn.norm import RMSNormConfig
from lm.nn.transformer import build_model
from lm.testing.models import redraw
from tests.nn.models import config

HEADS: dict[str, Any] = {"kind": "differential", "n_heads": 8, "n_kv_heads": 4, "head_dim": 6}


def by_the_paper(layer: Differential, x: Tensor, number: int) -> Tensor:
    """One pair of heads after the other, each map by itself.  arXiv:2410.05258, eqs. 1 to 3."""
    q, k, v = (linear(x).unflatten(-1, (-1, 6)) for linear in (layer.q, layer.k, layer.v))  # (b, s, heads, c)
    later = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)
    start = 0.8 - 0.6 * math.exp(-0.3 * number)
    share = torch.exp(layer.lambda_q1 @ layer.lambda_k1) - torch.exp(layer.lambda_q2 @ layer.lambda_k2) + start
    heads = []
    for pair in range(4):
        first, second = (
            (q[:, :, head] @ k[:, :, head // 2].mT / math.sqrt(6) + later).softmax(-1) for head in (pair, pair + 4)
        )  # two heads of queries share one of keys
        values = torch.cat([v[:, :, pair // 2], v[:, :, pair // 2 + 2]], -1)
        read = (first - share * second) @ values
        heads.append((1 - start) * read / (read.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    out: Tensor = layer.o(torch.cat(heads, -1))
    return out


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("number", [0, 5])
@torch.no_grad()
def test_it_is_the_difference_of_two_maps_over_values_of_twice_the_width(number: int) -> None:
    layer = config(attention=HEADS).attention.build(RMSNormConfig(), 32, number)
    assert isinstance(layer, Differential)
    for p in layer.parameters():
        p.zero_()
    redraw(layer)
    x = torch.randn(2, 17, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x, Context.alone(x)), by_the_paper(layer, x, number), atol=1e-9, rtol=1e-9)


def test_the_share_starts_near_what_the_depth_says() -> None:
    model = build_model(config(attention=HEADS), seed=0)
    shares = [layer.share().item() for layer in model.modules() if isinstance(layer, Differential)]
    assert shares == pytest.approx([0.8 - 0.6 * math.exp(-0.3 * number) for number in range(3)], abs=0.1)
    assert all(0 < float(p.detach().std()) < 0.2 for name, p in model.named_parameters() if "lambda" in name)
