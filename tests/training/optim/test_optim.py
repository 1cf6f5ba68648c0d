import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.errors import ConfigError
from lm.training.optim.adafactor import AdafactorConfig
from lm.training.optim.adamw import AdamWConfig
from lm.training.optim.base import OptimConfig, Skippable, begin_state, set_lr
from lm.training.optim.lion import LionConfig
from lm.training.optim.muon import MuonConfig
from lm.training.optim.sgd import SGDConfig
from lm.training.optim.soap import SoapConfig
from tests.training.optim.optimizers import begun

CONFIGS: list[OptimConfig] = [
    AdamWConfig(), MuonConfig(weight_decay=0.1), SGDConfig(), SGDConfig(momentum=0.9, weight_decay=0.1), AdamWConfig(state_bits=8),
    SoapConfig(precondition_frequency=2, weight_decay=0.1), AdafactorConfig(), AdafactorConfig(beta1=0.5, weight_decay=0.1),
    LionConfig(lr=1e-3),
]  # fmt: skip
IDS = ["adamw", "muon", "sgd", "sgd-momentum", "adamw-8", "soap", "adafactor", "adafactor-mean", "lion"]
MATRICES = {"0.weight", "2.weight"}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8), nn.Linear(8, 4))


def build(cfg: OptimConfig, net: nn.Module) -> Optimizer:
    return begun(cfg, net.named_parameters(), MATRICES)


def backward(net: nn.Module, seed: int) -> None:
    net.zero_grad()
    net(torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


def snapshot(net: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    return [t.detach().clone() for p in net.parameters() for t in (p, *optimizer.state[p].values())]


def test_an_optimizer_of_torch_that_a_plugin_returns_is_refused_with_the_class_to_derive_from() -> None:
    with pytest.raises(ConfigError, match=r"^optim: build returned Adam, .* derives from lm\.kinds\.Skippable"):
        begin_state(torch.optim.Adam(model().parameters()))


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("flag", ["read", "applied on the device"])
def test_a_step_with_found_inf_leaves_weights_and_state_bitwise_untouched(
    cfg: OptimConfig, bad: float, steps_before: int, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flag != "read":
        monkeypatch.setattr(Skippable, "_flag_is_here", lambda self: self.found_inf is None)
    net, plain = model(), model()
    optimizer, reference = build(cfg, net), build(cfg, plain)
    for step in range(steps_before):
        for n, o in ((net, optimizer), (plain, reference)):
            backward(n, step)
            o.step()
    before = snapshot(net, optimizer)
    backward(net, 7)
    for p in net.parameters():
        p.grad.view(-1)[0] = bad
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert all(map(same_bits, snapshot(net, optimizer), before))

    optimizer.found_inf = torch.tensor(0.0)
    for n, o in ((net, optimizer), (plain, reference)):
        backward(n, 8)
        o.step()
    assert all(map(same_bits, snapshot(net, optimizer), snapshot(plain, reference)))
    assert not all(map(same_bits, snapshot(net, optimizer), before))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_adamw_equals_unfused_torch_with_decay_on_matrices_only() -> None:
    cfg = AdamWConfig(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    net, plain = model(), model()
    optimizer = build(cfg, net)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, foreach=False, fused=False)
    for step in range(5):
        for n, o in ((net, optimizer), (plain, reference)):
            backward(n, step)
            o.step()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)  # another order of the same float32 operations


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torch(momentum: float) -> None:
    net, plain = model(), model()
    optimizer = build(SGDConfig(lr=0.001, momentum=momentum), net)
    reference = torch.optim.SGD(plain.parameters(), lr=0.001, momentum=momentum, foreach=False, fused=False)
    for step in range(4):
        for n, o in ((net, optimizer), (plain, reference)):
            backward(n, step)
            o.step()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
def test_every_trainable_parameter_is_in_one_group_and_vectors_never_decay(cfg: OptimConfig) -> None:
    net = model()
    net[0].bias.requires_grad_(False)
    named = dict(net.named_parameters())
    groups = build(cfg, net).param_groups
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(named.keys() - {"0.bias"})
    for group in groups:
        assert [id(named[name]) for name in group["names"]] == [id(p) for p in group["params"]]
        assert group["weight_decay"] == 0 or all(p.ndim == 2 for p in group["params"])


def test_muon_takes_the_named_matrices_and_adamw_the_rest() -> None:
    cfg = MuonConfig(lr=0.5, adam_lr=0.25, weight_decay=0.125, adam_weight_decay=0.0625)
    found = {tuple(g["names"]): (g["lr"], g["weight_decay"], "momentum" in g) for g in build(cfg, model()).param_groups}
    assert found == {
        ("3.weight",): (0.25, 0.0625, False),
        ("0.bias", "1.weight", "1.bias", "2.bias", "3.bias"): (0.25, 0.0, False),
        ("0.weight", "2.weight"): (0.5, 0.125, True),
    }


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
def test_set_lr_is_a_part_of_each_groups_peak_and_zero_changes_no_weight(cfg: OptimConfig) -> None:
    net = model()
    optimizer = build(cfg, net)
    set_lr(optimizer, 0.5)
    set_lr(optimizer, 0.25)
    assert [g["lr"] for g in optimizer.param_groups] == [g["peak_lr"] / 4 for g in optimizer.param_groups]
    set_lr(optimizer, 0.0)
    before = [p.detach().clone() for p in net.parameters()]
    backward(net, 0)
    optimizer.step()
    assert all(map(torch.equal, net.parameters(), before))


@pytest.mark.parametrize("cfg", [*CONFIGS[:3], *CONFIGS[4:]], ids=[*IDS[:3], *IDS[4:]])
def test_each_optimizer_lowers_a_loss(cfg: OptimConfig) -> None:
    net = model()
    optimizer = build(cfg, net)
    set_lr(optimizer, 1.0 if cfg.kind != "sgd" else 0.001)
    x, y = torch.randn(64, 8), torch.randn(64, 4)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0] if cfg.kind != "sgd" else losses[-1] < losses[0]


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
def test_bf16_weights_step_as_float32_weights_do_up_to_their_rounding(cfg: OptimConfig) -> None:
    steps = []
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(torch.linspace(-2, 2, 64 * 64).view(64, 64).to(dtype))
        optimizer = begun(cfg, [("0.weight", p)], MATRICES)
        set_lr(optimizer, {"adamw": 300, "muon": 200, "sgd": 3, "soap": 300, "adafactor": 50, "lion": 300}[cfg.kind])
        if cfg.kind == "soap":  # its first step finds a basis
            p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)
            optimizer.step()
        before = p.detach().clone()
        p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16().to(dtype)
        optimizer.step()
        steps.append((p - before).detach().float())
    assert steps[0].abs().mean() > 0.2
    assert (steps[0] - steps[1]).abs().max() < 2**-4  # bf16 has steps of 2^-5 at the largest values, up to 8
