"""The short convolution and the cache of states of fixed size: against transformers, a loop over tokens, and a cache cut anyhow."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.mixers.short_conv import ShortConv, ShortConvConfig
from lm.nn.position.base import Position
from lm.nn.transformer import DecoderLM, build_model
from lm.ops.attention.mask import Mask, arange_positions
from lm.ops.recurrence.convolve import fast, reference
from lm.testing.models import redraw, tokens
from tests.nn.models import CONV, DELTA, GLA, MAMBA, MAMBA2, RG_LRU, config, packed, redrawn

B, S, D = 2, 11, 6
HYBRID: dict[str, Any] = {"recurrent": CONV | {"kernel": 4}, "pattern": ["recurrent", "attention"]}
KINDS = {
    "short_conv": CONV | {"kernel": 4},
    "gated_delta": DELTA,
    "mamba2": MAMBA2,
    "gla": GLA,
    "channels": DELTA | {"channels": True},
    "rg_lru": RG_LRU,
    "mamba": MAMBA,
}
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def hybrid(kind: str = "short_conv") -> DecoderLM:
    return redrawn(config(**(HYBRID | {"recurrent": KINDS[kind]})))


def padded(left: int, right: int) -> Tensor:
    """Positions of rows with so much padding, the second with one more token in front."""
    at = torch.full((B, S), -1)
    at[0, left : S - right] = torch.arange(S - left - right)
    at[1, max(left - 1, 0) : S - right] = torch.arange(S - max(left - 1, 0) - right)
    return at


PLAIN = arange_positions(S, torch.device("cpu"))
ROW = packed([4, 1, 6])
MASKS = {
    "plain": Mask(PLAIN, PLAIN, square=True),
    "padded": Mask(padded(3, 2), padded(3, 2)),
    "documents": Mask(ROW.positions, ROW.positions, ROW.documents, ROW.documents),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("length", [2, 3, 5])
def test_the_fast_form_equals_the_loop_over_tokens_in_values_and_gradients(name: str, length: int) -> None:
    mask, source = MASKS[name], torch.Generator().manual_seed(length)
    u, kernel = (torch.randn(*shape, generator=source, dtype=torch.float64).requires_grad_() for shape in ((B, S, D), (D, length)))
    real = (mask.q_positions >= 0).expand(B, -1)
    results = []
    for form in (fast, reference):
        out = form(u, kernel, mask)[real]
        results.append([out, *torch.autograd.grad(out.square().sum(), (u, kernel))])
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-12)


def test_it_equals_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    from transformers import Lfm2Config

    cfg = Lfm2Config(hidden_size=D, num_hidden_layers=1, conv_L_cache=3, conv_bias=False, layer_types=["conv"])
    there, ours = theirs.Lfm2ShortConv(cfg, 0).double(), ShortConv(ShortConvConfig(kernel=3), D, 0).double()
    redraw(there)
    pairs = {ours.bcv.weight: there.in_proj.weight, ours.kernel: there.conv.weight.squeeze(1), ours.o.weight: there.out_proj.weight}
    for mine, other in pairs.items():
        mine.data.copy_(other.data)
    x = torch.randn(B, S, D, dtype=torch.float64)
    out = ours(x, Context(Position(), MASKS["plain"]))
    assert out.std() > 0.1
    torch.testing.assert_close(out, there(x), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 7], [2, 1, 9], [12]])
@torch.no_grad()
def test_padding_anywhere_in_a_chunk_is_passed_over(chunks: list[int], kind: str) -> None:
    """Two rows of 9 and 7 tokens with padding before, between and behind, cut anyhow."""
    model, ids = hybrid(kind), tokens(2, 12)
    at = torch.tensor([[-1, 0, 1, 2, -1, 3, 4, 5, 6, 7, 8, -1], [-1, -1, 0, -1, -1, 1, 2, 3, 4, -1, 5, 6]])
    cache, stops = model.new_cache(2, 12, slack=3), list(itertools.accumulate(chunks))
    spans = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    out = torch.cat([model(Batch(ids[:, span], positions=at[:, span]), cache=cache) for span in spans], 1)
    for row in range(2):
        real = at[row] >= 0
        torch.testing.assert_close(out[row, real], model(ids[row, real][None])[0], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 6])
@torch.no_grad()
def test_a_state_is_rewound_within_its_slack_and_reordered(chunk: int, kind: str) -> None:
    model, ids = hybrid(kind), tokens(2, 20)
    cache = model.new_cache(2, 40, slack=4)
    for part in ids[:, :12].split(chunk, 1):
        model(Batch(part), cache=cache)
    model(Batch(tokens(2, 3, seed=9)), cache=cache)
    cache.rewind(4)
    with pytest.raises(ValueError, match="cannot rewind 1 tokens"):
        cache.rewind(1)
    assert cache.length == 11
    cache.reorder(torch.tensor([1, 0]))
    out = model(Batch(ids.flip(0)[:, 11:]), cache=cache)
    torch.testing.assert_close(out, model(Batch(ids.flip(0)))[:, 11:], **CLOSE)


@torch.no_grad()
def test_rewinding_to_nothing_begins_anew() -> None:
    model, ids = hybrid(), tokens(2, 6)
    cache = model.new_cache(2, 10)
    model(Batch(tokens(2, 5, seed=3)), cache=cache)
    cache.rewind(5)
    torch.testing.assert_close(model(Batch(ids), cache=cache), model(Batch(ids)), **CLOSE)


def test_a_state_does_not_grow_with_the_sequence() -> None:
    cache = hybrid().new_cache(3, 1000, slack=4)
    assert list(cache.states) == [0, 2] and list(cache.stores) == [1]
    assert [tuple(x.shape) for x in cache.state(0)] == [(3, 3, 32)]


def test_a_kernel_starts_as_large_as_its_sum_needs() -> None:
    model = build_model(config(d_model=512, **HYBRID), seed=0)
    weights = dict(model.named_parameters())
    assert float(weights["blocks.0.recurrent.kernel"].detach().std()) == pytest.approx(1 / math.sqrt(4), rel=0.1)
    assert "blocks.0.recurrent.bcv.weight" in model.matrices() and "blocks.0.recurrent.kernel" not in model.matrices()


def test_a_mask_of_ones_own_is_refused() -> None:
    conv, own = ShortConv(ShortConvConfig(), D, 0), Mask(PLAIN, PLAIN, explicit=torch.ones(1, 1, S, S, dtype=torch.bool))
    with pytest.raises(ValueError, match="recurrent=short_conv reads from left to right"):
        conv(torch.zeros(1, S, D), Context(Position(), own))
