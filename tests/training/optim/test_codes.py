"""States in 8 bits: the nearest of 256 values, the same again after a checkpoint, and a step as near as these are."""

import pytest
import torch
from torch import Tensor, nn

from lm.training.optim import eight_bits
from lm.training.optim.adamw import AdamWConfig
from lm.training.optim.base import begin_state, named_state
from lm.training.optim.codes import BLOCK, Coded, blocks, dynamic_map, encoded
from tests.training.optim.optimizers import begun

SIGNED = pytest.mark.parametrize("signed", [True, False])


def numbers(signed: bool, scale: float = 1.0) -> Tensor:
    """Blocks of which one is empty, one of one size, and one of sizes from 1e-30 to 1."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(64, BLOCK, generator=source)
    x[1] = 0
    x[2] = -x[2, 0] if signed else x[2, 0]
    x[3] *= 10.0 ** (-30 * torch.rand(BLOCK, generator=source))
    return (x if signed else x.abs()) * scale


@SIGNED
def test_the_map_is_the_papers(signed: bool) -> None:
    """Of a signed one the decade below 1 has 64 values of each sign, in the middles of 64 equal parts; each decade below has half."""
    found = dynamic_map(signed)
    assert len(set(found)) == len(found) == 256 and found == sorted(found)
    assert found[-1] == 1 and 0 in found and (min(found) < 0) == signed
    parts = 64 if signed else 128
    for decade in range(7):
        low, high = 10.0 ** -(decade + 1), 10.0**-decade
        mine = [x for x in found if low < x < high]
        assert len(mine) == parts >> decade
        assert mine[0] - low == pytest.approx((high - low) / len(mine) / 2)
        assert not signed or [-x for x in mine] == [x for x in found if -high < x < -low][::-1]


@SIGNED
def test_a_code_is_that_of_the_nearest_value(signed: bool) -> None:
    x = numbers(signed)
    coded, values = encoded(x, signed), torch.tensor(dynamic_map(signed), dtype=torch.float64)
    parts = x.double() / coded.scales
    least = (parts.unsqueeze(-1) - values).abs().min(-1).values
    found = (parts - values[coded.codes.long()]).abs()
    lost = (found > least * (1 + 1e-6) + 1e-9) & (x != 0)
    assert not lost.any() if signed else (parts[lost] < values[1] / 2).all()  # unsigned: nothing above 0 becomes 0
    assert signed or ((coded.decode() == 0) == (x == 0)).all()


@SIGNED
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-30, 1e-12, 1.0, 1e20, 1e37])
def test_what_was_decoded_has_the_same_codes_again(signed: bool, scale: float) -> None:
    coded = encoded(numbers(signed, scale), signed)
    assert torch.isfinite(coded.decode()).all()
    again = encoded(coded.decode(), signed)
    assert torch.equal(again.codes, coded.codes) and torch.equal(again.scales, coded.scales)
    written = Coded(torch.zeros_like(coded.codes), torch.zeros_like(coded.scales), signed)
    written.encode_(coded.decode())
    assert torch.equal(written.decode(), coded.decode())


def test_a_tensor_that_fills_no_block_has_zeros_behind_it() -> None:
    x = torch.arange(1.0, 300.0)
    assert blocks(x).shape == (2, BLOCK) and blocks(x).flatten()[:299].equal(x) and not blocks(x).flatten()[299:].any()


def test_a_rank_that_has_nothing_of_a_weight_steps_with_the_others() -> None:
    p = nn.Parameter(torch.zeros(0, 4))
    optimizer = begun(AdamWConfig(state_bits=8), [("w", p)], {"w"})
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert {kind: x.numel() for _, kind, x in named_state(optimizer)} == {"step": 1, "exp_avg": 0, "exp_avg_sq": 0}
    assert optimizer.state[p]["step"] == 1


def weights(dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter]:
    """A matrix in codes, in several parts of a step, and an embedding that is not."""
    source = torch.Generator().manual_seed(1)
    return nn.Parameter(torch.randn(513, 600, generator=source).to(dtype)), nn.Parameter(torch.randn(600, generator=source).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_from_moments_that_are_codes_is_that_of_adamw_from_the_same(dtype: torch.dtype) -> None:
    """Seen to fail with a count that goes on in each part of a weight."""
    cfg = AdamWConfig(lr=0.01, state_bits=8)
    mine, wide = weights(dtype), weights(torch.float32)
    (coded, plain) = (
        begun(of, [(f"w{i}", p) for i, p in enumerate(ps)], {"w0"})
        for of, ps in ((cfg, mine), (cfg.model_copy(update={"state_bits": None}), wide))
    )
    assert coded.state[mine[0]]["exp_avg_codes"].dtype == torch.uint8 and "exp_avg" in coded.state[mine[1]]
    for step in range(3):
        states = [(name, kind, x.clone()) for name, kind, x in named_state(coded)]
        for (name, kind, x), (*same, y) in zip(states, named_state(plain), strict=True):
            assert [name, kind] == same and x.shape == y.shape
            y.copy_(x)
        for p, q in zip(mine, wide, strict=True):
            q.data.copy_(p.data)
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
            q.grad = p.grad.float()
        coded.step()
        plain.step()
        for p, q in zip(mine, wide, strict=True):
            torch.testing.assert_close(
                p.float(), q, **({"rtol": 0, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-3})
            )
    for (_, kind, x), (*_, y) in zip(named_state(coded), named_state(plain), strict=True):
        assert kind == "step" or (x - y).abs().max() <= 0.01 * y.abs().max()


def test_states_that_are_lent_and_given_back_change_nothing() -> None:
    p, _ = weights(torch.float32)
    optimizer = begun(AdamWConfig(state_bits=8), [("w", p)], {"w"})
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
    optimizer.step()
    before = {kind: x.clone() for kind, x in optimizer.state[p].items()}
    saved = {kind: x.clone() for _, kind, x in named_state(optimizer)}
    assert {kind: x.shape for kind, x in saved.items()} == {"step": torch.Size(), "exp_avg": p.shape, "exp_avg_sq": p.shape}
    begin_state(optimizer)
    assert not torch.equal(optimizer.state[p]["exp_avg_codes"], before["exp_avg_codes"])
    for _, kind, x in named_state(optimizer):
        x.copy_(saved[kind])
    assert all(torch.equal(x, before[kind]) for kind, x in optimizer.state[p].items())


def test_a_weight_in_several_parts_steps_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for elements in (1 << 18, 1 << 20):
        monkeypatch.setattr(eight_bits, "_at_a_time", lambda p, elements=elements: elements)
        p, _ = weights(torch.float32)
        optimizer = begun(AdamWConfig(state_bits=8), [("w", p)], {"w"})
        for step in range(2):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        found.append([p.detach(), *optimizer.state[p].values()])
    assert all(map(torch.equal, *found))
