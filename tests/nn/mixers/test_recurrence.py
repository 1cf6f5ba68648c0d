"""Mixers whose state is a matrix: against a loop over tokens, and against transformers, weight for weight."""

import itertools
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from lm.nn.context import Context
from lm.nn.mixers.gated_delta import GatedDelta, GatedDeltaConfig
from lm.nn.mixers.gla import GLA, GLAConfig
from lm.nn.mixers.mamba2 import Mamba2, Mamba2Config
from lm.nn.position.base import Position
from lm.nn.transformer import build_model
from lm.ops.attention.mask import Mask, arange_positions
from lm.ops.recurrence.matrix import Flow, chunked, reference
from lm.testing.models import redraw
from tests.nn.models import DELTA, MAMBA2, config, near

B, H, S, K, V = 2, 3, 37, 4, 5
D = 24


def flow(delta: bool, channels: int = 1) -> Flow:
    source = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(B, H, S, n, generator=source, dtype=torch.float64) for n in (K, K, V))
    decay, beta = (torch.rand(B, H, S, n, generator=source, dtype=torch.float64) for n in (channels, 1))
    return Flow(*(x.requires_grad_() for x in (q, k / k.norm(dim=-1, keepdim=True), v, -3 * decay)), 2 * beta if delta else None)


@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("documents", [None, [5, 1, 12, 3, 16]], ids=["one", "several"])
@pytest.mark.parametrize("delta", [False, True], ids=["added", "replaced"])
@pytest.mark.parametrize("channels", [1, K], ids=["heads", "channels"])
def test_chunks_equal_the_loop_over_tokens_in_values_states_and_gradients(
    channels: int, delta: bool, documents: list[int] | None, size: int
) -> None:
    mine = flow(delta, channels)
    of = None if documents is None else torch.repeat_interleave(torch.tensor(documents)).expand(B, -1)
    begun = mine.empty() if documents else torch.randn(B, H, K, V, dtype=torch.float64)
    wanted, states = reference(mine, begun, of)
    out, last = chunked(mine, begun, of, size)
    inputs = [mine.q, mine.k, mine.v, mine.decay]
    both = [[out, last, *torch.autograd.grad(out.square().sum() + last.sum(), inputs)]]
    both.append([wanted, states[-1], *torch.autograd.grad(wanted.square().sum() + states[-1].sum(), inputs)])
    assert wanted.abs().mean() > 0.1
    torch.testing.assert_close(*both, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("channels", [1, K], ids=["heads", "channels"])
def test_a_state_that_is_forgotten_at_once_stays_finite(channels: int) -> None:
    """Decays of thousands, whose sums differ by more than an exponential bears, forward and backward."""
    mine = flow(delta=True, channels=channels)
    strong = Flow(mine.q, mine.k, mine.v, mine.decay * 4000, mine.beta)
    out, _ = chunked(strong, strong.empty())
    grads = torch.autograd.grad(out.square().sum(), [mine.q, mine.k, mine.v, mine.decay])
    assert all(torch.isfinite(x).all() for x in (out, *grads))


def through(mixer: nn.Module, x: Tensor) -> Tensor:
    at = arange_positions(x.shape[1], x.device)
    out: Tensor = mixer(x, Context(Position(), Mask(at, at, square=True)))
    return out


def copied(ours: nn.Module, theirs: nn.Module, parts: dict[str, Tensor]) -> None:
    assert parts.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        parameter.data.copy_(parts[name].data)


@pytest.mark.parametrize("negative", [False, True])
def test_the_gated_delta_rule_equals_transformers(negative: bool) -> None:
    theirs = pytest.importorskip("transformers.models.olmo_hybrid.modeling_olmo_hybrid")
    from transformers import OlmoHybridConfig

    cfg = OlmoHybridConfig(
        hidden_size=D, num_hidden_layers=2, linear_num_value_heads=4, linear_num_key_heads=4, linear_key_head_dim=6,
        linear_value_head_dim=10, linear_conv_kernel_dim=3, linear_allow_neg_eigval=negative,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    there = theirs.OlmoHybridGatedDeltaNet(cfg, 0).double()
    ours = GatedDelta(GatedDeltaConfig(n_heads=4, k_dim=6, v_dim=10, kernel=3, negative=negative, eps=1e-5), D, 0).double()
    redraw(there)
    qkv = torch.cat([there.q_proj.weight, there.k_proj.weight, there.v_proj.weight])
    parts = {"qkv.weight": qkv, "gate.weight": there.g_proj.weight, "rate.weight": there.a_proj.weight, "beta.weight": there.b_proj.weight}
    parts |= {"kernel": there.conv1d.weight.squeeze(1), "fade": there.A_log, "step": there.dt_bias, "norm": there.o_norm.weight}
    copied(ours, there, parts | {"o.weight": there.o_proj.weight})
    x = torch.randn(2, 75, D, dtype=torch.float64)
    out = through(ours, x)
    assert out.std() > 0.01
    torch.testing.assert_close(out, there(x), atol=5e-5, rtol=5e-5)  # theirs computes in float32: of 60 draws the worst differed by 1.4e-5


def test_the_delta_rule_by_channels_equals_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    from transformers import KimiLinearConfig

    cfg = KimiLinearConfig(hidden_size=D, num_hidden_layers=2, linear_num_heads=4, linear_head_dim=6, linear_conv_kernel_dim=3)
    there = theirs.KimiLinearDeltaAttention(cfg, 0).double()
    ours = GatedDelta(GatedDeltaConfig(n_heads=4, k_dim=6, v_dim=6, kernel=3, channels=True, eps=1e-5), D, 0).double()
    forget = there.forget_gate
    forget.dt_bias.data.zero_()
    redraw(there)
    parts = {"qkv.weight": torch.cat([there.q_proj.weight, there.k_proj.weight, there.v_proj.weight]), "beta.weight": there.b_proj.weight}
    parts |= {"rate.0.weight": forget.f_a_proj.weight, "rate.1.weight": forget.f_b_proj.weight, "fade": forget.A_log.flatten()}
    parts |= {"gate.0.weight": there.g_a_proj.weight, "gate.1.weight": there.g_b_proj.weight, "step": forget.dt_bias}
    parts |= {"kernel": there.conv1d.weight.squeeze(1), "norm": there.o_norm.weight, "o.weight": there.o_proj.weight}
    copied(ours, there, parts)
    x = torch.randn(2, 75, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = through(ours, x)
    assert out.std() > 0.01
    near(out, there(x))  # theirs computes in float32


@pytest.mark.parametrize("decay", ["channel", "head", "constant"])
def test_gated_linear_attention_is_the_papers_sum_over_earlier_tokens(decay: Literal["channel", "head", "constant"]) -> None:
    """o_t = sum_j (q_t * a_(j+1) .. a_t) . k_j v_j of each head, with products of gates and no state.  arXiv:2312.06635, section 4."""
    n, k, v, s = 2, 3, 5, 21
    ours = GLA(GLAConfig(n_heads=n, k_dim=k, v_dim=v, kernel=2, decay=decay, rank=4), D, 0).double()
    ours.norm.data.fill_(1)
    redraw(ours)
    x = torch.randn(1, s, D, dtype=torch.float64)
    u = x[0] @ ours.qkv.weight.T
    u = nn.functional.silu(u * ours.kernel[:, 1] + torch.cat([torch.zeros_like(u[:1]), u[:-1]]) * ours.kernel[:, 0])
    gates = torch.stack([torch.full((s, k), 1 - 2.0 ** (-5 - head), dtype=torch.float64) for head in range(n)], dim=1)  # (s, n, k)
    if ours.rate is not None:
        gates = ours.rate(x)[0].unflatten(-1, (n, -1)).sigmoid().pow(1 / 16).expand(-1, -1, k)
    out = torch.zeros(s, n, v, dtype=torch.float64)
    for head, t in itertools.product(range(n), range(s)):
        q, keys, values = (u[:, at + head * width : at + (head + 1) * width] for at, width in ((0, k), (n * k, k), (2 * n * k, v)))
        for j in range(t + 1):
            out[t, head] += (q[t] / k**0.5 * gates[j + 1 : t + 1, head].prod(0)) @ keys[j] * values[j]
    normed = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * ours.norm
    wanted = (normed * nn.functional.silu(ours.gate(x)[0]).unflatten(-1, (n, v))).flatten(1) @ ours.o.weight.T
    assert wanted.std() > 0.01
    near(through(ours, x)[0], wanted)


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_equals_transformers(groups: int) -> None:
    theirs = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    from transformers import Mamba2Config as Theirs

    sizes: dict[str, Any] = {"n_groups": groups, "conv_kernel": 3, "chunk_size": 8, "layer_norm_epsilon": 1e-5}
    cfg = Theirs(hidden_size=D, num_heads=4, head_dim=12, expand=2, state_size=6, num_hidden_layers=1, **sizes)
    there = theirs.Mamba2Mixer(cfg, 0).double().eval()
    ours = Mamba2(Mamba2Config(n_heads=4, head_dim=12, state_dim=6, groups=groups, kernel=3, eps=1e-5), D, 0).double()
    redraw(there)
    gate, xbc, rate = there.in_proj.weight.split([48, 48 + 12 * groups, 4])
    parts = {"gate.weight": gate, "xbc.weight": xbc, "rate.weight": rate, "o.weight": there.out_proj.weight, "skip": there.D}
    parts |= {"kernel": there.conv1d.weight.squeeze(1), "kernel_bias": there.conv1d.bias, "norm": there.norm.weight}
    copied(ours, there, parts | {"fade": there.A_log, "step": there.dt_bias})
    x = torch.randn(2, 75, D, dtype=torch.float64)
    out = through(ours, x)
    assert out.std() > 0.01
    torch.testing.assert_close(out, there(x), atol=1e-5, rtol=1e-5)  # theirs computes in float32


@pytest.mark.parametrize("kind", [DELTA, MAMBA2], ids=lambda kind: kind["kind"])
def test_a_state_has_one_size_and_fades_by_itself_at_first(kind: dict[str, Any]) -> None:
    model = build_model(config(recurrent=kind, pattern=["recurrent", "attention"]), seed=0)
    sizes = [sum(x.numel() for x in model.new_cache(1, n).state(0)) for n in (8, 65536)]
    assert sizes[0] == sizes[1]
    weights = dict(model.named_parameters())
    fade, step = (weights[f"blocks.0.recurrent.{name}"].detach() for name in ("fade", "step"))
    assert 1 <= fade.exp().min() <= fade.exp().max() <= 16
    assert 1e-3 * 0.99 <= nn.functional.softplus(step).min() <= nn.functional.softplus(step).max() <= 1e-1 * 1.01
    assert f"blocks.0.recurrent.{'qkv' if kind is DELTA else 'xbc'}.weight" in model.matrices()
