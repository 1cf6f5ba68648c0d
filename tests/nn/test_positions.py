"""Positions against transformers' functions and the papers' formulas."""

from typing import Any

import pytest
import torch

from lm.errors import ConfigError
from lm.hf.options.context import with_plain_base
from lm.hf.options.rope import write_rope
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.position.base import Dims
from lm.nn.position.bias import AlibiConfig, alibi_slopes, t5_buckets
from lm.nn.position.rope import Rope, RopeConfig
from lm.nn.position.scaling import frequencies
from lm.ops.rotation import deinterleave, rope_angles, rotate_half
from lm.schema import flatten, from_tree
from lm.testing.models import tokens
from tests.nn.models import CLOSE, SCALINGS, config, redrawn

pytestmark = pytest.mark.usefixtures("doubles")

CPU = torch.device("cpu")


def rope(head_dim: int, max_len: int, **fields: Any) -> Rope:
    return Rope(from_tree(RopeConfig, fields), Dims(64, 4, head_dim, max_len, True))


REAL: list[dict[str, Any]] = [
    {"kind": "linear", "factor": 4.0},
    {"kind": "dynamic", "factor": 2.0, "original_len": 128},
    {"kind": "yarn", "factor": 8.0, "original_len": 128},
    {"kind": "yarn", "factor": 40.0, "original_len": 128, "beta_fast": 32.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"kind": "yarn", "factor": 32.0, "original_len": 128, "truncate": False, "attention_factor": 1.2},
    {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_len": 128},
    {"kind": "longrope", "short_factor": [1.0 + i / 8 for i in range(32)], "long_factor": [1.0 + i for i in range(32)],
     "original_len": 128},
    {"kind": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0 + i for i in range(32)], "original_len": 128, "factor": 6.0},
    {"kind": "proportional", "partial_rotary_factor": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("max_len", [128, 512])
@pytest.mark.parametrize("tree", REAL, ids=lambda tree: str(tree["kind"]))
def test_scalings_equal_those_of_transformers(tree: dict[str, Any], max_len: int) -> None:
    """Dynamic NTK and longrope depend on the length there, and on the configured maximum here."""
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    ours = rope(64, max_len, theta=5000.0, scaling=tree)
    parameters = write_rope(flatten({"position": ours.cfg.tree()}))["rope_parameters"]
    theirs = transformers_config(parameters, tree, max_len)
    rates, amplitude = rope_utils.ROPE_INIT_FUNCTIONS[tree["kind"]](theirs, CPU, seq_len=max_len)
    torch.testing.assert_close(ours.rates, rates, **CLOSE)
    assert ours.amplitude == pytest.approx(amplitude, rel=1e-6)
    if max_len > 128:
        assert not torch.allclose(ours.rates, frequencies(64, 5000.0), rtol=1e-3)


def transformers_config(parameters: dict[str, Any], tree: dict[str, Any], max_len: int) -> Any:
    import transformers

    longest = 128 if tree["kind"] == "dynamic" else max_len  # there it is the length of pretraining
    return transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=longest, rope_parameters=parameters
    )


def test_every_scaling_is_in_the_grid_and_here() -> None:
    assert {tree["kind"] for tree in REAL} == {tree["kind"] for tree in SCALINGS} == {
        "linear", "dynamic", "yarn", "llama3", "longrope", "proportional",
    }  # fmt: skip


def test_what_does_not_turn_stays_as_it_is() -> None:
    """Of 8 pairs the first 2; they turn as in a head that rotates whole, where fraction has other rates."""
    position, x = rope(16, 128, theta=500.0, scaling={"kind": "proportional", "partial_rotary_factor": 0.3}), torch.randn(1, 1, 3, 16)
    at = torch.tensor([[0, 5, 99]])
    whole, part = (each.rotate(x, each.angles(at), 0) for each in (rope(16, 128, theta=500.0), position))
    turning = [0, 1, 8, 9]
    still = [i for i in range(16) if i not in turning]
    assert torch.equal(part[..., still], x[..., still])
    assert torch.equal(part[..., turning], whole[..., turning]) and not torch.allclose(whole[..., still], x[..., still])


def test_a_short_context_needs_no_dynamic_scaling() -> None:
    tree = {"kind": "dynamic", "factor": 2.0, "original_len": 128}
    torch.testing.assert_close(rope(64, 100, scaling=tree).rates, frequencies(64, 10000.0))
    assert rope(64, 512, scaling=tree).rates[-1] < rope(64, 256, scaling=tree).rates[-1] < rope(64, 128, scaling=tree).rates[-1]


@pytest.mark.parametrize(("max_len", "kept"), [(100, False), (128, True), (512, False)])
def test_dynamic_scaling_is_another_base_where_transformers_would_begin_later(max_len: int, kept: bool) -> None:
    """To the bit. transformers' length of pretraining is the longest row."""
    ours = rope(64, max_len, theta=500.0, fraction=0.5, scaling={"kind": "dynamic", "factor": 2.0, "original_len": 128})
    there = with_plain_base(ours.cfg, 64, max_len)
    assert torch.equal(Rope(there, Dims(64, 4, 64, max_len, True)).rates, ours.rates)
    assert (there == ours.cfg) == kept == (there.scaling is not None)


def test_the_amplitude_is_on_cosine_and_sine() -> None:
    yarn = rope(64, 512, scaling={"kind": "yarn", "factor": 8.0, "original_len": 64, "attention_factor": 1.5})
    angles = yarn.angles(torch.tensor([[0, 3, 9]]))
    assert angles is not None
    torch.testing.assert_close(angles[0].square() + angles[1].square(), torch.full_like(angles[0], 2.25))


@pytest.mark.parametrize("n_heads", [1, 4, 6, 8, 12, 16])
def test_alibi_equals_blooms(n_heads: int) -> None:
    modeling = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = modeling.build_alibi_tensor(torch.ones(1, 9, dtype=torch.int64), n_heads, torch.float32).view(n_heads, 9)
    torch.testing.assert_close(torch.tensor(alibi_slopes(n_heads)), theirs[:, 1])
    at = torch.arange(9)[None]
    bias = AlibiConfig().build(Dims(32, n_heads, 8, 16, True)).bias(at, at)
    assert bias is not None and bias.shape == (1, n_heads, 9, 9)
    last = theirs - theirs[:, -1:]  # there keys are numbered, and the softmax cancels the query's own number
    torch.testing.assert_close(bias[0, :, -1], last)
    torch.testing.assert_close(bias, bias.transpose(-1, -2))  # bidirectional: by distance, whichever the side


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (8, 20), (6, 9)])
def test_buckets_equal_t5s(causal: bool, n_buckets: int, max_distance: int) -> None:
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-200, 201)
    theirs = modeling.T5Attention._relative_position_bucket(distance, not causal, n_buckets, max_distance)
    ours = t5_buckets(distance, n_buckets, max_distance, causal)
    assert torch.equal(ours, theirs) and len(ours.unique()) == (n_buckets if causal else n_buckets - 1)


def test_the_relative_bias_is_one_table_for_all_layers_and_one_for_each_stack() -> None:
    model = redrawn(config(position={"kind": "t5_relative", "n_buckets": 8, "max_distance": 12}))
    assert [name for name, _ in model.named_parameters() if "table" in name] == ["position.table.weight"]
    at = torch.tensor([[0, 1, 5]])
    bias = model.position.bias(at, at)
    table = model.position.table.weight
    assert bias is not None
    torch.testing.assert_close(bias[0, :, 1, 0], table[1])  # key one before the query
    torch.testing.assert_close(bias[0, :, 0, 2], table[0])  # a later key, which a causal mask hides
    torch.testing.assert_close(bias[0, :, 2, 0], table[t5_buckets(torch.tensor(-5), 8, 12, True)])


def test_each_layer_may_have_a_table_of_its_own() -> None:
    model = redrawn(config(position={"kind": "t5_relative", "n_buckets": 8, "max_distance": 12, "shared": False}, n_layers=3))
    at, table = torch.tensor([[0, 1, 5]]), model.position.table.weight
    assert table.shape == (3 * 8, 4)
    for layer in range(3):
        bias = model.position.bias_of_layer(at, at, layer)
        assert bias is not None
        torch.testing.assert_close(bias[0, :, 1, 0], table[layer * 8 + 1])
    with pytest.raises(ConfigError, match=r"has a bias for each layer\. Ask bias_of_layer"):
        model.position.bias(at, at)
    logits = model(tokens(1, 6))
    table.data[16:] += 1.0 * torch.arange(8)[:, None]
    assert not torch.allclose(model(tokens(1, 6)), logits)  # the last layer reads the last rows


def test_interleaved_pairs_turn_as_complex_numbers() -> None:
    x, at = torch.randn(1, 2, 5, 8), torch.arange(5)[None]
    rates = frequencies(6, 100.0)
    turned = rotate_half(deinterleave(x, 6), *rope_angles(at, rates))
    numbers = torch.view_as_complex(x[..., :6].reshape(1, 2, 5, 3, 2))
    by_hand = numbers * torch.polar(torch.ones(5, 3), at[0, :, None] * rates)
    torch.testing.assert_close(turned[..., :3], by_hand.real)
    torch.testing.assert_close(turned[..., 3:6], by_hand.imag)
    assert torch.equal(turned[..., 6:], x[..., 6:])


@pytest.mark.parametrize(("place", "layers"), [(None, (2, 5)), (2, (2, 5)), (0, (0, 3, 6)), (1, (1, 4))])
def test_every_nth_layer_does_not_rotate(place: int | None, layers: tuple[int, ...]) -> None:
    q, k, at = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8), torch.arange(5)[None]
    module = rope(8, 16, none_every=3, none_at=place)
    for layer in range(7):
        new_q, new_k = (module.rotate(x, module.angles(at), layer) for x in (q, k))
        assert torch.equal(new_q, q) == torch.equal(new_k, k) == (layer in layers)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["learned", "sinusoidal"])
def test_absolute_positions_are_added_once_below_the_first_block(kind: str) -> None:
    model = redrawn(config(position={"kind": kind}, embed={"scale": 3.0}))
    ids = tokens(1, 6)
    bare = redrawn(config(position={"kind": "none"}, embed={"scale": 3.0}))
    at = torch.arange(6)[None]
    ctx = Context.alone(model.embed(ids))
    added = model.embedded(model.embed(ids), ctx, None) - bare.embedded(model.embed(ids), ctx, None)
    assert added.abs().max() > 0.5
    torch.testing.assert_close(added, model.position.embed(torch.zeros(1, 6, 32), at), **CLOSE)  # not scaled
    moved = model(Batch(ids, positions=at + 1)) - model(Batch(ids))
    assert moved.abs().max() > 1e-2
