"""Second derivatives: those of the plain paths are right, and the fast ones refuse them instead of leaving terms out."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lm
from lm.errors import ConfigError
from lm.kinds import causal_reader
from lm.nn.model_config import model_config
from lm.nn.transformer import LM, build_model
from lm.testing.models import BASE

AGAIN = {"_RotateHalf", "_OfHeld"}
"""Functions whose backward is made of what autograd knows."""
IDS = torch.arange(12).view(2, 6)


def functions() -> dict[str, type[torch.autograd.Function]]:
    """Every autograd.Function of lm."""
    root = Path(lm.__file__).parents[1]
    files = [path for path in (root / "lm").rglob("*.py") if "autograd.Function" in path.read_text()]
    names = [path.relative_to(root).with_suffix("").as_posix().replace("/", ".") for path in files if path.name != "once.py"]
    found = [value for name in names for value in vars(import_module(name)).values() if isinstance(value, type)]
    return {kind.__name__: kind for kind in found if issubclass(kind, torch.autograd.Function)}


def test_every_backward_by_hand_refuses_or_can_be_differentiated_again() -> None:
    found = functions()
    assert len(found) == 15 and found.keys() >= AGAIN
    for name, kind in found.items():
        wrapped = getattr(kind.backward, "__wrapped__", None)
        assert (wrapped is None) == (name in AGAIN), name


def drawn(**slots: Any) -> LM:
    return build_model(model_config(BASE | slots), seed=0)


def twice(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """The Hessian times ones."""
    weights = list(model.parameters())
    grads = torch.autograd.grad(loss, weights, create_graph=True)
    return list(torch.autograd.grad(torch.stack([g.sum() for g in grads]).sum(), weights))


def loss_of(model: LM) -> Tensor:
    return F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten(), reduction="sum")


def test_second_derivatives_of_the_logits_in_float64_are_differences_of_the_first() -> None:
    model = drawn(norm={"kind": "rms"}, position={"kind": "rope"}).double()
    weights, step, sides = list(model.parameters()), 1e-5, []
    with sdpa_kernel(SDPBackend.MATH):
        found = twice(model, loss_of(model))
        for at in (step, -2 * step):
            with torch.no_grad():
                for each in weights:
                    each.add_(at)
            sides.append(torch.autograd.grad(loss_of(model), weights))
    for of, high, low in zip(found, *sides, strict=True):
        torch.testing.assert_close(of, (high - low) / (2 * step), rtol=1e-3, atol=1e-3 * float(of.abs().max()))  # angles are float32


@pytest.mark.parametrize("path", ["loss in chunks", "norm in float32"])
def test_fast_paths_refuse_second_derivatives(path: str) -> None:
    chunks = path == "loss in chunks"
    model = drawn(norm={"kind": "layer" if chunks else "rms"})
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(ConfigError, match="create_graph=True: second derivatives were asked for"):
        twice(model, model(IDS, read=causal_reader(IDS)).total if chunks else loss_of(model))
