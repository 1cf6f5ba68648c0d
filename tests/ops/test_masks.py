"""Masks, sinks, biases and prefixes: the fused backend equals the reference, and each says what it should of a small case by hand."""

import pytest
import torch
from torch import Tensor

from lm.nn.batch import Batch
from lm.ops.attention.attend import Scoring, choose, reference, sdpa
from lm.ops.attention.mask import Mask, arange_positions
from lm.testing.models import tokens
from tests.nn.models import CLOSE, config, packed, redrawn

pytestmark = pytest.mark.usefixtures("doubles")

CPU = torch.device("cpu")
LEFT = torch.tensor([[-1, -1, 0, 1, 2, 3, 4, 5, 6], list(range(9))])  # two columns of padding before the first row


def inputs(heads: tuple[int, int] = (4, 4)) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, 9, 8, generator=source).requires_grad_() for h in (heads[0], heads[1], heads[1])]


def gradients(out: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    return list(torch.autograd.grad((out * weight).sum(), wanted))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_sdpa_equals_the_reference_with_bias_and_sinks_and_their_gradients(
    window: int | None, heads: tuple[int, int], with_bias: bool, with_sinks: bool, chunked: bool
) -> None:
    qkv, mask, how = inputs(heads), Mask(LEFT, LEFT), Scoring(0.3, window, chunked=chunked)
    bias = torch.randn(1, 4, 9, 9, requires_grad=True) if with_bias else None
    sinks = torch.randn(4, requires_grad=True) if with_sinks else None
    wanted = [x for x in (*qkv, bias, sinks) if x is not None]
    fast, plain = (attend(*qkv, mask, bias, how, sinks) for attend in (sdpa, reference))
    torch.testing.assert_close(fast, plain, **CLOSE)
    expected = gradients(plain, wanted)
    torch.testing.assert_close(gradients(fast, wanted), expected, **CLOSE)
    assert (fast[0, :, :2] == 0).all() and all(g.isfinite().all() and g.abs().max() > 0 for g in expected)


@pytest.mark.parametrize("attend", [sdpa, reference])
def test_a_sink_takes_its_part_of_the_softmax(attend: object) -> None:
    q, k, v = inputs()
    at, sinks = arange_positions(9, CPU), torch.tensor([-30.0, 0.0, 1.0, 30.0])
    assert callable(attend)
    out = attend(q, k, v, Mask(at, at), None, Scoring(0.3), sinks)
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    powers = scores.exp()
    expected = powers @ v / (powers.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    torch.testing.assert_close(out, expected, **CLOSE)
    assert out[:, 3].abs().max() < 1e-6


def test_sinks_with_a_soft_cap_leave_the_sink_uncapped() -> None:
    q, k, v = inputs()
    at, sinks = arange_positions(9, CPU), torch.tensor([9.0, 0.0, 1.0, -1.0])
    out = reference(q, k, v, Mask(at, at), None, Scoring(0.3, softcap=2.0), sinks)
    scores = (2.0 * torch.tanh(q @ k.transpose(-1, -2) * 0.15)).masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    expected = scores.exp() @ v / (scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("with_bias", [False, True])
def test_queries_without_any_key_give_zeros_and_finite_gradients(with_bias: bool) -> None:
    q, k, v = inputs()
    nothing = torch.full((2, 9), -1)
    bias = torch.randn(2, 4, 9, 9, requires_grad=True) if with_bias else None
    for attend in (sdpa, reference):
        out = attend(q, k, v, Mask(LEFT, nothing, causal=False), bias, Scoring(0.3))
        assert (out == 0).all() and all((g == 0).all() for g in gradients(out, [q, k, v]))


def test_every_field_of_a_mask_hides_what_it_says() -> None:
    at = arange_positions(4, CPU)
    prefix, documents = torch.tensor([[True, True, False, False]]), torch.tensor([[0, 0, 1, 1]])
    explicit = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    explicit[..., 3, 0] = False
    triangle = ["1000", "1100", "1110", "1111"]
    cases = {
        "causal": (Mask(at, at), None, triangle),
        "both ways": (Mask(at, at, causal=False), None, ["1111"] * 4),
        "window": (Mask(at, at), 2, ["1000", "1100", "0110", "0011"]),
        "window both ways": (Mask(at, at, causal=False), 2, ["1100", "1110", "0111", "0011"]),
        "prefix": (Mask(at, at, k_prefix=prefix), None, ["1100", "1100", "1110", "1111"]),
        "documents": (Mask(at, at, documents, documents), None, ["1000", "1100", "0010", "0011"]),
        "explicit": (Mask(at, at, explicit=explicit), None, [*triangle[:3], "0111"]),
        "padding": (Mask(at - 1, at - 1), None, ["0000", "0100", "0110", "0111"]),
    }
    for name, (mask, window, expected) in cases.items():
        seen = ["".join("01"[int(bit)] for bit in row) for row in mask.allowed(window)[0, 0]]
        assert seen == expected, name


def test_a_chunk_is_seen_and_nothing_before_it() -> None:
    """Counted from the start of a document, whatever is in front of it."""
    at, long = torch.tensor([[-1, 0, 1, 2, 3, 0, 1]]), torch.tensor([[0, 0, 0, 0, 0, 1, 1]])
    cases = {
        True: ["0000000", "0100000", "0110000", "0001000", "0001100", "0000010", "0000011"],
        False: ["0000000", "0110000", "0110000", "0001100", "0001100", "0000011", "0000011"],
    }
    for causal, expected in cases.items():
        allowed = Mask(at, at, long, long, causal=causal).allowed(2, chunked=True)[0, 0]
        assert ["".join("01"[int(bit)] for bit in row) for row in allowed] == expected


def test_only_whole_rows_are_plain() -> None:
    at = arange_positions(4, CPU)
    yes = torch.ones(1, 4, dtype=torch.bool)
    assert Mask(at, at, square=True).plain(None) == Mask(at, at, square=True).plain(4) == "causal"
    assert Mask(at, at, causal=False, square=True).plain(None) == "full"
    others = [Mask(at, at), Mask(at, at, square=True, k_prefix=yes), Mask(at, at, square=True, explicit=yes[None, None])]
    assert [mask.plain(None) for mask in others] == [None] * 3 and Mask(at, at, square=True).plain(3) is None


def test_explicit_masks_of_heads_and_rows_are_kept_by_every_backend() -> None:
    q, k, v = inputs((4, 2))
    explicit = torch.rand(2, 4, 9, 9, generator=torch.Generator().manual_seed(1)) > 0.4
    mask = Mask(LEFT, LEFT, causal=False, explicit=explicit)
    fast, plain = (attend(q, k, v, mask, None, Scoring(0.3)) for attend in (sdpa, reference))
    torch.testing.assert_close(fast, plain, **CLOSE)
    torch.testing.assert_close(gradients(fast, [q, k, v]), gradients(plain, [q, k, v]), **CLOSE)
    assert not torch.allclose(fast, sdpa(q, k, v, Mask(LEFT, LEFT, causal=False), None, Scoring(0.3)))


def with_prefix(batch: Batch, *places: int) -> Batch:
    batch.prefix = torch.zeros_like(batch.tokens, dtype=torch.bool)
    batch.prefix[:, list(places)] = True
    return batch


ATTENTIONS = [{"n_heads": 4}, {"n_heads": 4, "window": 30}, {"n_heads": 4, "softcap": 5.0}, {"n_heads": 4, "gpt_oss_sinks": True}]


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_tokens_of_a_prefix_see_each_other_and_no_one_else_sees_ahead(attention: dict[str, object]) -> None:
    model = redrawn(config(attention=attention))
    ids = tokens(1, 12)

    def moved(place: int) -> list[int]:
        other = ids.clone()
        other[0, place] = (other[0, place] + 1) % 61
        apart = model(with_prefix(Batch(ids), 0, 1, 2, 3, 4)) - model(with_prefix(Batch(other), 0, 1, 2, 3, 4))
        return (apart[0].abs().amax(-1) > 1e-4).nonzero().flatten().tolist()

    assert moved(4) == moved(0) == list(range(12)) and moved(7) == [7, 8, 9, 10, 11]


@torch.no_grad()
def test_a_prefix_stays_within_its_document() -> None:
    model, row = redrawn(config()), with_prefix(packed([5, 7]), 0, 1, 2, 5, 6, 7, 8)
    parts = [
        model(with_prefix(Batch(row.tokens[:, span]), *places)) for span, places in ((slice(0, 5), (0, 1, 2)), (slice(5, 12), (0, 1, 2, 3)))
    ]
    torch.testing.assert_close(model(row), torch.cat(parts, 1), **CLOSE)


@pytest.mark.parametrize("attention", [*ATTENTIONS, {"n_heads": 4, "window": 4}])
@torch.no_grad()
def test_a_prefix_is_cached_as_it_is_seen_in_full(attention: dict[str, object]) -> None:
    model = redrawn(config(attention=attention))
    ids, cache = tokens(2, 12), model.new_cache(2, 12, slack=2)
    full = model(with_prefix(Batch(ids), 0, 1, 2, 3, 4))
    pieces = [model(with_prefix(Batch(ids[:, :7]), 0, 1, 2, 3, 4), cache=cache)]
    pieces += [model(Batch(ids[:, t : t + 1]), cache=cache) for t in range(7, 12)]
    torch.testing.assert_close(torch.cat(pieces, 1), full, **CLOSE)
    assert (full - model(Batch(ids))).abs().max() > 1e-2
    with pytest.raises(ValueError, match=r"batch\.prefix was given to a cache that holds tokens already"):
        model(with_prefix(Batch(ids[:, :1]), 0), cache=cache)


def test_the_backend_for_sinks_says_why() -> None:
    assert choose(CPU, 64, Scoring(1.0), sinks=True) is sdpa
    assert choose(CPU, 64, Scoring(1.0, softcap=3.0), sinks=True) is reference


@pytest.mark.parametrize("width", [5, 13])
@pytest.mark.parametrize("square", [True, False])
def test_values_of_another_width_than_keys_have_the_fused_kernel_too(width: int, square: bool) -> None:
    """A CPU's takes equal widths alone; for others torch writes all scores."""
    q, k, _ = inputs((4, 2))
    v = torch.randn(2, 2, 9, width, requires_grad=True)
    mask = Mask(at := arange_positions(9, CPU), at, square=True) if square else Mask(LEFT, LEFT)
    fast, plain = (attend(q, k, v, mask, None, Scoring(0.3)) for attend in (sdpa, reference))
    assert fast.shape == (2, 4, 9, width)
    torch.testing.assert_close(fast, plain, **CLOSE)
    torch.testing.assert_close(gradients(fast, [q, k, v]), gradients(plain, [q, k, v]), **CLOSE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        sdpa(q, k, v, mask, None, Scoring(0.3))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {event.name for event in profiler.events()}
