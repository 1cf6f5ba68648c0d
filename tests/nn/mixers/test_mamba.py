"""Mamba: against a loop over tokens; what it begins with, and gradients at the ends."""

import pytest
import torch

from lm.nn.context import Context
from lm.nn.mixers.mamba import Mamba, MambaConfig
from lm.nn.position.base import Position
from lm.nn.transformer import build_model
from lm.ops.attention.mask import Mask
from lm.testing.models import redraw
from tests.nn.models import MAMBA, config

B, D = 2, 16
CFG = MambaConfig(width=20, state_dim=5, rank=3, kernel=3)


def by_hand(mixer: Mamba, x: torch.Tensor, at: list[int]) -> torch.Tensor:
    """Token by token, of one row; a state begins at position 0, and padding is no token.  x: (s, d)."""
    w, n, taps = CFG.width, CFG.state_dim, CFG.kernel
    h, last, out = torch.zeros(w, n), [torch.zeros(w)] * taps, []
    rates = mixer.fade.view(w, n).exp()
    for token, position in zip(x, at, strict=True):
        if position < 0:
            out.append(torch.zeros(D))
            continue
        if position == 0:
            h, last = torch.zeros(w, n), [torch.zeros(w)] * taps
        last = [*last[1:], mixer.x(token)]
        u = torch.nn.functional.silu((torch.stack(last, -1) * mixer.kernel).sum(-1) + mixer.kernel_bias)
        step, write, read = mixer.select(u).split([CFG.rank, n, n])
        dt = torch.nn.functional.softplus(mixer.step(step))
        h = (-rates * dt[:, None]).exp() * h + (dt * u)[:, None] * write
        out.append(mixer.o((h @ read + mixer.skip * u) * torch.nn.functional.silu(mixer.gate(token))))
    return torch.stack(out)


@torch.no_grad()
@pytest.mark.parametrize(
    "at", [[*range(11)], [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3, 4, 5, 6, 7, -1]], ids=["one", "several", "padding"]
)
def test_it_equals_a_loop_over_tokens(at: list[int]) -> None:
    mixer = Mamba(CFG, D, 0).double()
    for vector in (mixer.fade, mixer.skip, mixer.kernel_bias):
        assert vector is not None
        vector.zero_()  # made empty, and redraw adds to what is in vectors
    redraw(mixer)
    x, positions = torch.randn(B, len(at), D, dtype=torch.float64), torch.tensor(at).expand(B, -1)
    documents = (positions == 0).cumsum(1)
    out = mixer(x, Context(Position(), Mask(positions, positions, documents, documents)))
    for row in range(B):
        expected, real = by_hand(mixer, x[row], at), torch.tensor(at) >= 0
        assert expected.std() > 0.05
        torch.testing.assert_close(out[row][real], expected[real], rtol=1e-10, atol=1e-10)


def test_padding_neither_fades_nor_writes_and_a_first_token_finds_nothing() -> None:
    mixer, at = Mamba(CFG, D, 0), torch.tensor([-1, 0, 1, -1, 2])[None, :, None]
    mixer.fade.data.fill_(-1)
    fade, new = mixer.flow(torch.randn(B, 5, 20), torch.randn(B, 5, 20), torch.randn(B, 5, 5), at)
    assert fade.shape == new.shape == (B, 5, 100)
    assert (fade[:, [0, 3]] == 1).all() and (new[:, [0, 3]] == 0).all()
    assert (fade[:, 1] == 0).all() and ((fade[:, [2, 4]] > 0) & (fade[:, [2, 4]] < 1)).all() and (new[:, [1, 2, 4]] != 0).all()


def test_gradients_stay_finite_where_a_channel_forgets_everything() -> None:
    mixer = Mamba(CFG, D, 0)
    mixer.fade.data.fill_(6.0), mixer.skip.data.fill_(0), mixer.kernel_bias.data.fill_(0)
    redraw(mixer)
    mixer.step.bias.data.fill_(50.0)
    x, at = torch.randn(B, 7, D, requires_grad=True), torch.tensor([[-1, 0, 1, 2, 3, 4, -1]]).expand(B, -1)
    out = mixer(x, Context(Position(), Mask(at, at)))
    out.square().sum().backward()
    grads = [x.grad, *(p.grad for p in mixer.parameters())]
    assert out.isfinite().all() and all(grad is not None and grad.isfinite().all() for grad in grads)


def test_decays_and_steps_begin_as_in_the_paper() -> None:
    """A of 1, 2, ..., state_dim; steps between 0.001 and 0.1 where nothing is said."""
    model = build_model(config(recurrent=MAMBA | {"width": 240}, pattern=["recurrent", "attention"]), seed=0)
    weights = dict(model.named_parameters())
    torch.testing.assert_close(weights["blocks.0.recurrent.fade"].view(240, 5).exp(), torch.arange(1.0, 6).expand(240, 5))
    steps = torch.nn.functional.softplus(weights["blocks.0.recurrent.step.bias"])
    assert 0.00099 < steps.min() < 0.0015 and 0.08 < steps.max() < 0.101
    assert {"blocks.0.recurrent.x.weight", "blocks.0.recurrent.select.weight"} < model.matrices()
