"""Noise on the embeddings in training."""

import pytest
import torch

from lm.nn.context import Context
from tests.nn.models import config, redrawn


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_noise_is_even_and_as_large_as_its_root_of_a_rows_numbers_says(scale: float) -> None:
    """Behind the factor on embeddings."""
    model = redrawn(config(embed={"noise": 5.0, "scale": scale})).train()
    x = torch.randn(7, 30, model.cfg.d_model)
    most = 5 / (30 * model.cfg.d_model) ** 0.5
    added = torch.cat([model.embedded(x, Context.alone(x), None) - scale * x for _ in range(50)]) / most
    assert 0.99 < added.abs().max() < 1.001
    assert added.mean().abs() < 0.02 and abs(added.square().mean() - 1 / 3) < 0.01
    assert model.eval().embedded(x, Context.alone(x), None).equal(scale * x)
