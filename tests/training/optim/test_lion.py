import pytest
import torch
from pytorch_optimizer import Lion
from torch import nn

from lm.training.optim.lion import LionConfig
from tests.training.optim.optimizers import begun


@pytest.mark.parametrize("beta2", [0.99, 0.5])
def test_steps_are_those_of_another_implementation(beta2: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in {"w": (6, 40), "bias": (16,)}.items()}
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    optimizer = begun(LionConfig(lr=0.03, beta2=beta2, weight_decay=0.5), ours.items(), ())
    groups = [{"params": [theirs["w"]], "weight_decay": 0.5}, {"params": [theirs["bias"]], "weight_decay": 0.0}]
    reference = Lion(groups, lr=0.03, betas=(0.9, beta2))
    for _ in range(8):
        for name, p in ours.items():
            p.grad = torch.randn(p.shape, generator=generator)
            theirs[name].grad = p.grad.clone()
        optimizer.step()
        reference.step()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name])
