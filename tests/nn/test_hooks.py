"""PyTorch's hooks meet what the code says: every layer of every kind is called as a module, and nothing changes its result later."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm.errors import ConfigError
from lm.nn.batch import Batch
from lm.nn.mixers.base import Attention
from lm.nn.model_config import model_config
from lm.nn.position.base import Position
from lm.nn.transformer import LM
from lm.ops.attention.attend import weights
from lm.testing.models import random_model, tokens
from tests.nn.grid import NAMES, SLOTS, tree_of
from tests.nn.models import ATTENTIONS, config, redrawn

UNCALLED = (Position, nn.ModuleList, nn.Identity)  # a position is asked by its other methods; an Identity may stand for no feed-forward


def models(kind: str) -> Iterator[LM]:
    """One for every value of every slot that this kind takes."""
    for slot, name in enumerate(NAMES):
        for value in range(len(SLOTS[name])):
            with suppress(ConfigError):
                yield random_model(model_config(tree_of(kind, ((slot, value),))))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("encoder", "encoder_decoder"))])
def test_every_layer_calls_its_hooks_with_what_stays_as_it_is(kind: str) -> None:
    batch, tried = Batch(tokens(2, 9), source_tokens=tokens(2, 7, 2) if kind == "encoder_decoder" else None), 0
    for model in models(kind):
        tried += 1
        for gradients in (False, True):  # which kernels there are depends on it
            seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

            def keep(module: nn.Module, given: tuple[Any, ...], out: Any, seen: dict[nn.Module, Any] = seen) -> None:
                both = [x.detach() for x in (*given, out) if isinstance(x, Tensor)]
                seen.setdefault(module, []).extend((x, x.clone()) for x in both)

            hooks = [module.register_forward_hook(keep) for module in model.modules()]
            with torch.set_grad_enabled(gradients):
                model(batch)
            for hook in hooks:
                hook.remove()
            silent = [name for name, module in model.named_modules() if module not in seen and not isinstance(module, UNCALLED)]
            assert not [name for name in silent if name != "encoder" and not name.endswith("_residual.sublayer")], model.cfg
            assert all(torch.equal(now, then) for found in seen.values() for now, then in found), model.cfg
    assert tried > 60


@pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
def test_the_weights_of_the_values_are_those_by_which_an_attention_reads(attention: dict[str, Any]) -> None:
    model, apart = redrawn(config(attention=attention)), list[float]()
    expected = model(tokens(2, 9))
    for layer in (each for each in model.modules() if isinstance(each, Attention)):

        def recording(q: Tensor, k: Tensor, v: Tensor, mask: Any, *options: Any, attend: Any = layer.attend) -> Tensor:
            out, read = attend(q, k, v, mask, *options), weights(q, k, mask, *options)
            assert read.shape == (*q.shape[:3], k.shape[2])
            apart.append((read @ v.repeat_interleave(q.shape[1] // v.shape[1], 1) - out).abs().max().item())
            return out

        layer.attend = recording
    assert torch.equal(model(tokens(2, 9)), expected)
    assert len(apart) >= 3 and max(apart) < 1e-5  # some roundings of 6e-8 of values of size 1
