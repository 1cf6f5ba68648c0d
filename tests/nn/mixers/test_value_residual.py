"""Values of the first layer in those of later ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm.errors import ConfigError
from lm.hf.io.writing import family_for
from lm.nn.batch import Batch
from lm.nn.transformer import build_model
from lm.ops.recompute import Recompute
from lm.testing.models import tokens
from tests.nn.models import config, redrawn

HEADS: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "window": 5, "global_every": 2}
RESIDUAL: dict[str, Any] = {"attention": HEADS | {"value_residual": True}}


@pytest.mark.usefixtures("doubles")
@torch.no_grad()
def test_it_is_attention_whose_values_a_hook_has_mixed() -> None:
    """V_n becomes a V_1 + b V_n in a model without the option.  arXiv:2410.17897, section 3."""
    model, plain = redrawn(config(**RESIDUAL)), redrawn(config(attention=HEADS))
    weights = model.state_dict()
    shares = {layer: weights.pop(f"blocks.{layer}.attention.shares") for layer in (1, 2)}
    plain.load_state_dict(weights)
    first: list[Tensor] = []

    def mixed(layer: int) -> Any:
        def hook(linear: nn.Module, given: Any, v: Tensor) -> Tensor:
            if layer == 0:
                first.append(v)
                return v
            return float(shares[layer][0]) * first[-1] + float(shares[layer][1]) * v

        return hook

    unmixed = plain(tokens(2, 17))
    for layer, block in enumerate(plain.blocks):
        block.get_submodule("attention.v").register_forward_hook(mixed(layer))
    out = model(tokens(2, 17))
    torch.testing.assert_close(out, plain(tokens(2, 17)), atol=1e-9, rtol=1e-9)
    assert (out - unmixed).abs().max() > 0.1


def test_both_shares_start_at_a_half_and_the_first_layer_has_none() -> None:
    weights = {name: p for name, p in build_model(config(**RESIDUAL), seed=0).named_parameters() if name.endswith("shares")}
    assert list(weights) == ["blocks.1.attention.shares", "blocks.2.attention.shares"]
    assert all(p.tolist() == [0.5, 0.5] for p in weights.values())


@pytest.mark.parametrize("how", [Recompute("block"), Recompute("block", 2), Recompute("selective")], ids=str)
def test_blocks_that_are_run_again_for_the_backward_give_the_same_gradients(how: Recompute) -> None:
    model, ids = redrawn(config(**RESIDUAL)).train(), tokens(2, 17)
    expected = torch.autograd.grad(model(Batch(ids)).square().sum(), [*model.parameters()])
    model.recomputes(how)
    found = torch.autograd.grad(model(Batch(ids)).square().sum(), [*model.parameters()])
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_no_family_of_transformers_has_a_place_for_it() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention\.value_residual=true must be false"):
        family_for(config(attention={"n_heads": 4, "value_residual": True}))
