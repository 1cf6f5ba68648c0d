"""The RG-LRU: against a loop over tokens, and against transformers, weight for weight."""

import pytest
import torch
from torch import Tensor

from lm.nn.context import Context
from lm.nn.mixers.rg_lru import RGLRU, RGLRUConfig
from lm.nn.position.base import Position
from lm.nn.transformer import build_model
from lm.ops.attention.mask import Mask
from lm.ops.recurrence.channels import chunked, reference
from lm.testing.models import Doubles, redraw, same
from tests.nn.models import RG_LRU, config

B, W, D = 2, 24, 16
CFG = RGLRUConfig(width=W, n_heads=3, kernel=3)


def tokens_do(s: int, n_documents: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """What tokens do to a state, and one to begin with; a document begins where nothing is left of it."""
    source = torch.Generator().manual_seed(s)
    fade, new = (torch.rand(B, s, W, generator=source, dtype=torch.float64), torch.randn(B, s, W, generator=source, dtype=torch.float64))
    fade[:, :: -(-s // n_documents)] = 0
    return fade.requires_grad_(), new.requires_grad_(), torch.randn(B, W, generator=source, dtype=torch.float64)


@pytest.mark.parametrize("s", [1, 2, 9, 37, 64])
@pytest.mark.parametrize("n_documents", [1, 3])
def test_chunks_equal_the_loop_over_tokens_in_values_and_gradients(s: int, n_documents: int) -> None:
    fade, new, begun = tokens_do(s, n_documents)
    results = []
    for form in (reference, chunked):
        out = form(fade, new, begun)
        results.append([out, *torch.autograd.grad(out.square().sum(), (fade, new))])
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5]], ids=["one", "several"])
def test_it_equals_transformers(positions: list[int]) -> None:
    """There a state ends where positions restart, as here; their convolution knows no documents, so it is of one token here."""
    theirs = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    from transformers import RecurrentGemmaConfig

    cfg = RecurrentGemmaConfig(
        hidden_size=D, num_attention_heads=3, lru_width=W, num_hidden_layers=1, block_types=["recurrent"], conv1d_width=3
    )
    there, ours = theirs.RecurrentGemmaRecurrentBlock(cfg, 0).double().eval(), RGLRU(CFG, D, 0).double()
    rule = there.rg_lru
    rule.recurrent_param.data.zero_()  # it is made empty, and redraw adds to what is in vectors
    redraw(there)
    there.conv_1d.weight.data[..., :-1] *= 0.0 if 0 in positions[1:] else 1.0
    pairs = {"kernel": there.conv_1d.weight.squeeze(1), "kernel_bias": there.conv_1d.bias, "fade": rule.recurrent_param}
    pairs |= {"write.weight": rule.input_gate_weight.mT, "rate.weight": rule.recurrent_gate_weight.mT}
    pairs |= {"write.bias": rule.input_gate_bias, "rate.bias": rule.recurrent_gate_bias}
    for mine, other in {"x": there.linear_x, "gate": there.linear_y, "o": there.linear_out}.items():
        pairs |= {f"{mine}.weight": other.weight, f"{mine}.bias": other.bias}
    assert pairs.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        parameter.data.copy_(pairs[name].data)
    x, at = torch.randn(B, len(positions), D, dtype=torch.float64), torch.tensor(positions).expand(B, -1)
    documents = (at == 0).cumsum(1)
    with Doubles(), torch.no_grad():
        out = ours(x, Context(Position(), Mask(at, at, documents, documents)))
        expected, _ = there(x, at, None, use_cache=False)
    assert expected.std() > 0.1
    same(out, expected)


def test_padding_neither_fades_nor_adds_and_a_first_token_finds_nothing() -> None:
    mixer, at = RGLRU(CFG, D, 0), torch.tensor([-1, 0, 1, -1, 2])[None, :, None]
    mixer.fade.data.fill_(-4)
    fade, new = mixer.flow(*(torch.randn(B, 5, W) for _ in range(3)), at)
    assert (fade[:, [0, 3]] == 1).all() and (new[:, [0, 3]] == 0).all()
    assert (fade[:, 1] == 0).all() and ((fade[:, [2, 4]] > 0) & (fade[:, [2, 4]] < 1)).all() and (new[:, [1, 2, 4]] != 0).all()


def test_gradients_stay_finite_where_a_channel_keeps_everything_or_nothing() -> None:
    """Gates that are shut, whose root is of 0, and gates that are open; with padding, which does neither."""
    mixer = RGLRU(CFG, D, 0)
    mixer.fade.data.fill_(-4), mixer.kernel_bias.data.fill_(0)
    redraw(mixer)
    mixer.rate.bias.data[0], mixer.rate.bias.data[1] = -200.0, 200.0
    x, at = torch.randn(B, 7, D, requires_grad=True), torch.tensor([[-1, 0, 1, 2, 3, 4, -1]]).expand(B, -1)
    out = mixer(x, Context(Position(), Mask(at, at)))
    out.square().sum().backward()
    grads = [x.grad, *(p.grad for p in mixer.parameters())]
    assert out.isfinite().all() and all(grad is not None and grad.isfinite().all() for grad in grads)


def test_what_is_left_of_a_channel_starts_between_nine_tenths_and_all_but_a_thousandth() -> None:
    model = build_model(config(recurrent=RG_LRU | {"width": 240}, pattern=["recurrent", "attention"]), seed=0)
    weights = dict(model.named_parameters())
    left = (-8 * torch.nn.functional.softplus(weights["blocks.0.recurrent.fade"].detach())).exp()
    assert 0.9 * 0.9999 <= left.min() < 0.91 and 0.99 < left.max() <= 0.999 * 1.0001
    assert {"blocks.0.recurrent.x.weight", "blocks.0.recurrent.rate.weight"} < model.matrices()
