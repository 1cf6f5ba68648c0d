"""Fast paths equal their readable reference, in values and gradients; sizes equal hand counts."""

import math

import pytest
import torch

from lm.cost.count import count
from lm.errors import ConfigError
from lm.nn.batch import Batch
from lm.nn.position.absolute import Sinusoidal, SinusoidalConfig
from lm.nn.position.scaling import frequencies
from lm.nn.transformer import DecoderConfig, build_model
from lm.ops.attention.attend import Scoring, choose, reference, sdpa
from lm.ops.attention.mask import Mask, arange_positions
from lm.ops.rotation import rope_angles, rotate, rotate_half
from lm.schema import from_tree
from lm.testing.models import tokens
from tests.nn.models import CLOSE, config, redrawn, with_kinds

pytestmark = pytest.mark.usefixtures("doubles")


def grads(out: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    return list(torch.autograd.grad((out * weight).sum(), inputs))


@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_fast_rotation_equals_the_reference(rotary_dim: int) -> None:
    q = torch.randn(2, 5, 3, 16).transpose(1, 2).requires_grad_()
    cos, sin = rope_angles(torch.randint(0, 100, (2, 5)), frequencies(rotary_dim, 10000.0))
    fast, plain = rotate(q, cos, sin), rotate_half(q, cos, sin)
    torch.testing.assert_close(fast, plain)
    torch.testing.assert_close(grads(fast, q), grads(plain, q))


def test_rotary_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(i: int, j: int) -> torch.Tensor:
        turned_q = rotate(q, *rope_angles(torch.tensor([[i]]), frequencies(16, 100.0)))
        return (turned_q * rotate(k, *rope_angles(torch.tensor([[j]]), frequencies(16, 100.0)))).sum()

    torch.testing.assert_close(score(9, 4), score(25, 20), **CLOSE)
    assert abs(score(9, 4) - score(9, 5)) > 1e-4


def test_xielu_equals_the_papers_formula() -> None:
    """And has a gradient where e^x overflows. Both factors are 0.8 at first; the lower one is at least 1/2."""
    act = build_model(config(ffn={"gated": False, "activation": "xielu"}), seed=0).double().blocks[0].get_submodule("ffn.act")
    x = torch.tensor([-30.0, -2.0, -0.5, 0.5, 2.0, 1000.0], requires_grad=True)
    for a, b in ((0.8, 0.8), (1.7, 0.6)):
        for name, value in (("alpha_p", a), ("alpha_n", b - 0.5)):
            if a != b:
                act.get_parameter(name).data.fill_(math.log(math.expm1(value)))
        below, above = b * (x.exp() - 1 - x) + 0.5 * x, a * x**2 + 0.5 * x
        torch.testing.assert_close(act(x), torch.where(x > 0, above, below), rtol=1e-7, atol=1e-7)
        slope = torch.where(x > 0, 2 * a * x + 0.5, b * (x.clamp(max=0).exp() - 1) + 0.5)
        torch.testing.assert_close(torch.autograd.grad(act(x).sum(), x)[0], slope, rtol=1e-7, atol=1e-7)


def test_sinusoidal_position_equals_the_papers_formula() -> None:
    x, positions = torch.zeros(1, 4, 6), torch.tensor([[0, 1, 2, 7]])
    out, halves = (Sinusoidal(SinusoidalConfig(halves=apart)).embed(x, positions) for apart in (False, True))
    for row, p in enumerate((0, 1, 2, 7)):
        for i in range(3):
            angle = torch.tensor(p / 10000.0 ** (2 * i / 6))
            torch.testing.assert_close(out[0, row, 2 * i], angle.sin())
            torch.testing.assert_close(out[0, row, 2 * i + 1], angle.cos())
    torch.testing.assert_close(halves, torch.cat([out[..., 0::2], out[..., 1::2]], dim=-1))
    exact = Sinusoidal(SinusoidalConfig(exact=True, first=3, theta=100.0)).embed(x, positions)
    rates = torch.tensor([1.0, 0.1, 0.01])  # down to 1 / theta
    torch.testing.assert_close(exact[0, :, 0::2], torch.sin((positions[0, :, None] + 3) * rates))


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_sdpa_equals_the_reference(window: int | None, documents: bool, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, heads[0], 9, 8, requires_grad=True)
    k, v = (torch.randn(2, heads[1], 9, 8, requires_grad=True) for _ in range(2))
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    ids = torch.tensor([[-1, -1, 0, 0, 0, 0, 1, 1, 1], [0] * 9])
    square = Mask(arange_positions(9, q.device), arange_positions(9, q.device), square=True)
    mask = Mask(positions, positions, ids, ids) if documents else square
    how = Scoring(0.3, window)
    fast, plain = sdpa(q, k, v, mask, None, how), reference(q, k, v, mask, None, how)
    torch.testing.assert_close(fast, plain, **CLOSE)
    torch.testing.assert_close(grads(fast, q, k, v), grads(plain, q, k, v), **CLOSE)
    if documents:
        assert (fast[0, :, :2] == 0).all() and (plain[0, :, :2] == 0).all()


@torch.no_grad()
def test_a_gate_per_head_is_one_per_element_whose_rows_repeat() -> None:
    models = [redrawn(config(attention={"n_heads": 4, "out_gate": gate})) for gate in ("head", "element")]
    weights = dict(models[0].named_parameters())
    for name, p in models[1].named_parameters():
        p.copy_(weights[name].repeat_interleave(8, 0) if ".gate." in name and "attention" in name else weights[name])
    found = [model(tokens(2, 9)) for model in models]
    torch.testing.assert_close(found[1], found[0])
    models[1].blocks[0].attention.gate.weight.zero_()
    assert not torch.allclose(models[1](tokens(2, 9)), found[0])


def test_a_bias_is_added_by_every_backend() -> None:
    q, k, v, bias = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 5)
    mask, how = Mask(arange_positions(5, q.device), arange_positions(5, q.device), square=True), Scoring(0.3)
    torch.testing.assert_close(sdpa(q, k, v, mask, bias, how), reference(q, k, v, mask, bias, how), **CLOSE)
    assert not torch.allclose(sdpa(q, k, v, mask, bias, how), sdpa(q, k, v, mask, None, how))


def test_a_soft_cap_needs_the_reference_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert choose(cpu, 64, Scoring(1.0)) is sdpa
    assert choose(cpu, 64, Scoring(1.0, softcap=30.0)) is reference


def test_counts_equal_the_hand_count_of_gpt2() -> None:
    cfg = config(
        vocab_size=50257, max_seq_len=1024, d_model=768, n_layers=12, norm={"kind": "layer"}, position={"kind": "learned"},
        attention={"n_heads": 12, "qkv_bias": True, "out_bias": True}, ffn={"gated": False, "activation": "gelu_tanh", "bias": True},
    )  # fmt: skip
    counts = count(cfg, 1024)
    assert counts.parameters == 124_439_808  # Radford et al. 2019, as counted by transformers
    assert counts.cache_bytes_per_token == 12 * 2 * 768 * 2
    matrices = 12 * 12 * 768 * 768 + 50257 * 768
    assert counts.forward_flops_per_token == 2 * matrices + 12 * 4 * 768 * 1024
    assert counts.train_flops_per_token == 3 * counts.forward_flops_per_token


def test_windows_lower_the_flops_but_not_the_parameters() -> None:
    wide, narrow = (count(config(attention={"n_heads": 4, "window": w}), 48) for w in (None, 8))
    assert wide.parameters == narrow.parameters
    assert wide.forward_flops_per_token - narrow.forward_flops_per_token == 3 * 4 * 32 * 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": {"n_heads": 12, "n_kv_heads": 5, "head_dim": 4}}, r"not a multiple of n_kv_heads=5\. Make that one of 1, 2, 3, 4"),
        ({"d_model": 34}, "d_model=34 is not a multiple of n_heads=4"),
        ({"position": {"kind": "rope", "fraction": 0.4}}, "rotates 3 dimensions"),
        ({"block": {"kind": "parallel"}, "norm": {"kind": "rms", "place": "post"}}, "place=post has no meaning in block=parallel"),
        ({"attention": {"n_heads": 4, "global_every": 2}}, "global_every=2 has no effect without a window"),
        ({"attention": {"n_heads": 4, "window": 0}}, "attention.window: 0 does not fit"),
        ({"ffn": {"activation": "swish"}}, "'swish' is not an option"),
    ],
)  # fmt: skip
def test_slots_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_tree(DecoderConfig, with_kinds(config().tree() | changes))


@torch.no_grad()
def test_the_heads_soft_cap_bounds_the_logits_by_its_formula() -> None:
    plain, capped = (redrawn(config(head={"softcap": cap})) for cap in (None, 2.0))
    ids = Batch(tokens(2, 9))
    torch.testing.assert_close(capped(ids), 2.0 * torch.tanh(plain(ids) / 2.0), **CLOSE)
    assert plain(ids).abs().max() > 2 > capped(ids).abs().max()
