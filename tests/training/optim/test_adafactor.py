from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lm.training.optim.adafactor import AdafactorConfig
from tests.training.optim.optimizers import begun

SHAPES = {"wide": (6, 40), "tall": (40, 6), "embed": (20, 16), "bias": (16,), "scalar": ()}


def parameters(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def gradient(p: Tensor, step: int) -> Tensor:
    """One whose rows and columns differ in size, and that at times grows."""
    noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) * (10 if step == 4 else 1)
    return noise * torch.linspace(1, 3, p.numel()).view_as(p)


@pytest.mark.parametrize("options", [{}, {"scale_parameter": False}, {"beta1": 0.9}, {"clip_threshold": 0.5, "decay_rate": 0.6}], ids=str)
def test_steps_are_those_of_another_implementation(options: dict[str, Any]) -> None:
    ours = parameters(**SHAPES)
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    optimizer = begun(AdafactorConfig(lr=0.03, **options), ours.items(), ())
    options = options | {"decay_rate": -options.get("decay_rate", 0.8)}
    reference = transformers.Adafactor(theirs.values(), lr=0.03, relative_step=False, **{"scale_parameter": True} | options)
    for step in range(8):
        for name in SHAPES:
            ours[name].grad, theirs[name].grad = gradient(ours[name], step), gradient(ours[name], step)
        optimizer.step()
        reference.step()
        for name in SHAPES:
            torch.testing.assert_close(ours[name], theirs[name])


def test_weight_decay_is_that_of_torch() -> None:
    ours = parameters(matrix=(6, 40))
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    optimizer = begun(AdafactorConfig(lr=0.03, weight_decay=0.5), ours.items(), ())
    reference = torch.optim.Adafactor(theirs.values(), lr=0.03, weight_decay=0.5)
    for step in range(8):
        ours["matrix"].grad, theirs["matrix"].grad = gradient(ours["matrix"], step), gradient(ours["matrix"], step)
        optimizer.step()
        reference.step()
        torch.testing.assert_close(ours["matrix"], theirs["matrix"])


def test_each_matrix_of_a_stack_steps_as_it_would_alone() -> None:
    ours = parameters(stack=(3, 6, 40))
    alone = {str(i): nn.Parameter(p.clone()) for i, p in enumerate(ours["stack"].detach())}
    optimizers = [begun(AdafactorConfig(lr=0.03), params.items(), ()) for params in (ours, alone)]
    for step in range(4):
        ours["stack"].grad = gradient(ours["stack"], step) * torch.tensor([1.0, 9.0, 0.1]).view(3, 1, 1)
        for p, grad in zip(alone.values(), ours["stack"].grad, strict=True):
            p.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(ours["stack"], torch.stack(list(alone.values())))


@pytest.mark.parametrize("shape", [(20, 16), (16, 20)], ids=["rows", "columns"])
def test_rows_and_columns_without_a_gradient_stay_where_others_have_a_huge_one(shape: tuple[int, int]) -> None:
    ours, twenty = parameters(embed=shape), shape.index(20)
    still = torch.arange(20) % 2 == 0
    before = ours["embed"].detach().clone()
    optimizer = begun(AdafactorConfig(lr=0.03), ours.items(), ())
    for step in range(3):
        ours["embed"].grad = gradient(ours["embed"], step) * 1e12 * (~still).unsqueeze(1 - twenty)
        optimizer.step()
    same = (ours["embed"] == before).movedim(twenty, 0)
    assert ours["embed"].isfinite().all() and same[still].all() and not same[~still].any()
