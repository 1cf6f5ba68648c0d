from typing import Any

import pytest
import torch
from pytorch_optimizer import SOAP
from torch import nn

from lm.training.optim.soap import SoapConfig
from lm.training.optim.traits import Traits
from tests.training.optim.optimizers import begun

SHAPES = {"square": (16, 16), "wide": (16, 40), "tall": (40, 16), "stack": (3, 16, 24), "embed": (20, 16), "bias": (16,)}
MATRICES = {"square", "wide", "tall", "stack"}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def set_gradients(params: dict[str, nn.Parameter], step: int) -> None:
    """A direction that stays, and noise."""
    for seed, share in ((1, 1.0), (100 + step, 0.5)):
        generator = torch.Generator().manual_seed(seed)
        for p in params.values():
            new = share * torch.randn(p.shape, generator=generator)
            p.grad = new if seed == 1 or p.grad is None else p.grad + new


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("max_precondition_dim", [10_000, 30])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_steps_are_those_of_another_implementation(every: int, max_precondition_dim: int, decay: float) -> None:
    """Which vectors span what the first gradient is silent about is left to chance, so both begin with the same basis."""
    ours, own = parameters(), {"precondition_frequency": every, "max_precondition_dim": max_precondition_dim}
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items() if name in MATRICES and name != "stack"}
    matrices = [nn.Parameter(p) for p in ours["stack"].detach().clone()]
    optimizer = begun(SoapConfig(lr=0.01, beta1=0.9, weight_decay=decay, **own), ours.items(), MATRICES)
    reference = SOAP([*theirs.values(), *matrices], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, **own)
    for step in range(14):
        set_gradients(ours, step)
        for name, p in theirs.items():
            p.grad = ours[name].grad.clone()
        for p, grad in zip(matrices, ours["stack"].grad, strict=True):
            p.grad = grad.clone()
        if step:
            with torch.no_grad():
                for p in (*theirs.values(), *matrices):
                    p *= 1 - 0.01 * decay
        optimizer.step()
        reference.step()
        for name, p in theirs.items():
            torch.testing.assert_close(ours[name], p, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(ours["stack"], torch.stack(matrices), atol=2e-5, rtol=1e-4)
        if step == 0:
            for key, i in (("left_basis", 0), ("right_basis", 1)):
                for name, p in theirs.items():
                    if key in optimizer.state[ours[name]]:
                        optimizer.state[ours[name]][key].copy_(reference.state[p]["Q"][i])
                optimizer.state[ours["stack"]][key].copy_(torch.stack([reference.state[p]["Q"][i] for p in matrices]))


def test_the_first_step_finds_the_eigenvectors_and_leaves_the_matrices_as_they_are() -> None:
    params = parameters()
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer = begun(SoapConfig(), params.items(), MATRICES)
    set_gradients(params, 0)
    optimizer.step()
    assert {name for name, p in params.items() if torch.equal(p, before[name])} == MATRICES
    for name in MATRICES:
        state = optimizer.state[params[name]]
        for side in ("left", "right"):
            basis, products = state[f"{side}_basis"], state[side]
            unit = torch.eye(basis.shape[-1]).expand_as(basis)
            torch.testing.assert_close(basis.mT @ basis, unit, atol=1e-5, rtol=0)
            found = basis.mT @ products @ basis
            values = found.diagonal(dim1=-2, dim2=-1)
            assert (values.diff(dim=-1) < 1e-5).all(), "the largest come first"
            assert (found - torch.diag_embed(values)).abs().max() < 1e-5 * values.max()


def test_one_sided_has_a_basis_of_the_shorter_side_and_a_long_side_has_none() -> None:
    def sides(**options: Any) -> dict[str, set[str]]:
        params = parameters()
        optimizer = begun(SoapConfig(**options), params.items(), MATRICES)
        return {name: {key for key in optimizer.state[params[name]] if key in ("left", "right")} for name in sorted(MATRICES)}

    both = {"left", "right"}
    assert sides() == {"square": both, "stack": both, "tall": both, "wide": both}
    assert sides(one_sided=True) == {"square": {"left"}, "stack": {"left"}, "tall": {"right"}, "wide": {"left"}}
    assert sides(max_precondition_dim=20) == {"square": both, "stack": {"left"}, "tall": {"right"}, "wide": {"left"}}
    assert sides(max_precondition_dim=8) == {name: set() for name in sorted(MATRICES)}


def test_without_a_basis_the_steps_are_adams_one_step_later() -> None:
    cfg = SoapConfig(lr=0.01, max_precondition_dim=1, weight_decay=0.1)
    ours, theirs = parameters(), parameters()
    optimizer = begun(cfg, ours.items(), MATRICES)
    reference = torch.optim.AdamW([theirs[name] for name in sorted(MATRICES)], lr=0.01, betas=(0.95, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(4):
        set_gradients(ours, step)
        optimizer.step()
        if step:
            for name in MATRICES:
                theirs[name].grad = ours[name].grad
            reference.step()
        for name in MATRICES:
            torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=1e-5)


def test_the_embedding_and_groups_have_rates_of_their_own() -> None:
    cfg = SoapConfig(lr=0.01, embed_lr=0.05, weight_decay=0.1)
    params = parameters()
    traits = {name: Traits(name in MATRICES, p.ndim > 1, table=name == "embed") for name, p in params.items()}
    traits["wide"] = traits["wide"]._replace(lr=0.002)
    groups = cfg.build([*params.items()], traits).param_groups
    found = {name: (group["lr"], group["weight_decay"], "precondition_frequency" in group) for group in groups for name in group["names"]}
    assert found == {
        "square": (0.01, 0.1, True),
        "tall": (0.01, 0.1, True),
        "stack": (0.01, 0.1, True),
        "wide": (0.002, 0.1, True),
        "embed": (0.05, 0.1, False),
        "bias": (0.01, 0.0, False),
    }
