"""The transforms of torch.func: gradients of each row alone, and several models at once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from lm.nn.model_config import model_config
from lm.nn.transformer import LM, build_model
from lm.testing.models import BASE

IDS = torch.arange(18).view(3, 6)
SLOTS: dict[str, dict[str, Any]] = {
    "rope": {"norm": {"kind": "rms"}, "position": {"kind": "rope"}},
    "learned": {"norm": {"kind": "layer"}, "position": {"kind": "learned"}},
    "bias": {"norm": {"kind": "rms"}, "position": {"kind": "t5_relative"}},
    "window": {"position": {"kind": "rope"}, "attention": {"kind": "gqa", "n_heads": 2, "window": 3}},
    "wide": {"d_model": 256, "ffn": {"kind": "mlp", "hidden": 8192}},  # of products that oneDNN makes
}


def drawn(seed: int = 0, **slots: Any) -> LM:
    return build_model(model_config(BASE | slots), seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_gradients_of_each_row_are_those_of_a_backward_over_it(slots: dict[str, Any], dtype: torch.dtype) -> None:
    model = drawn(**slots).to(dtype)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (row[None],))[0].float(), row)

    found = vmap(grad(loss), (None, 0))(weights, IDS)
    for i, row in enumerate(IDS):
        alone = grad(loss)(weights, row)
        wanted = torch.autograd.grad(F.cross_entropy(model(row[None])[0].float(), row), list(model.parameters()))
        for name, by_backward in zip(weights, wanted, strict=True):
            near = (2e-2 if dtype == torch.bfloat16 else 1e-5) * max(1.0, float(by_backward.abs().max()))
            torch.testing.assert_close(found[name][i], by_backward, rtol=0, atol=near)
            torch.testing.assert_close(alone[name], by_backward, rtol=0, atol=near)


def test_several_models_at_once() -> None:
    models = [drawn(seed, position={"kind": "rope"}, norm={"kind": "rms"}) for seed in (0, 1)]
    weights, buffers = stack_module_state(models)
    with torch.no_grad():
        found = vmap(lambda *state: functional_call(models[0], state, (IDS,)))(weights, buffers)
        torch.testing.assert_close(found, torch.stack([model(IDS) for model in models]))
