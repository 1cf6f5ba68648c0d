"""What an optimizer is told of each weight: how it is treated, and what the model's parametrization makes of the settings for it."""

import math
from typing import NamedTuple

from lm.errors import ConfigError
from lm.nn.parametrization import Growth, Role
from lm.nn.transformer import LM


class Rates(NamedTuple):
    """Factors of one weight on what an optimizer is told. All are 1 at the base size."""

    adam: float = 1.0
    """On AdamW's rate."""
    muon: float = 1.0
    """On Muon's rate."""
    eps: float = 1.0
    """On AdamW's eps: as the gradient of a weight."""


class Traits(NamedTuple):
    """Those of one weight. An engine may have cut it when the optimizer is built, so that its shape no longer tells."""

    matrix: bool
    """One of the blocks' matrices, or a stack of them."""
    decays: bool
    """No norm, bias or other vector."""
    rates: Rates = Rates()


def rates(role: Role, growth: Growth, in_block: bool) -> Rates:
    """AdamW moves each element as far as any other, so what sums m times as many moves them 1/m as far; Muon's update has the same spectral
    norm at any width already, and a few scores take 1/sqrt(m) of it (Yang et al. 2023, arXiv:2310.17813).

    Gradients are those of a mean loss: 1/m where they pass the head's multiplier, 1/l within a branch; a router's sums m of them.
    """
    m, depth = growth.width, growth.depth if in_block else 1.0
    if role == "vector":
        return Rates(eps=1 / (m * depth))
    return Rates(1 / m, 1.0, 1 / (m * depth)) if role == "hidden" else Rates(1 / m, 1 / math.sqrt(m), 1 / depth)


def traits_of(model: LM) -> dict[str, Traits]:
    """Returns them by name, of whole weights; experts' biases are stacked, (e, out).

    Raises ConfigError for a weight of which nothing tells whether it reads the width, where the parametrization asks.
    """
    growth, roles, matrices = model.cfg.growth(), model.roles(), model.matrices()
    in_blocks = {id(p) for unit in model.units() for p in unit.parameters()}
    found = {}
    for name, p in model.named_parameters():
        if (role := roles[name]) is None and growth != Growth():
            raise ConfigError(
                f"model.parametrization={model.cfg.parametrization.kind}: {name} is drawn by a function of its own, which does not tell"
                " whether it reads the width. Draw it by one of lm.nn.init, or use parametrization=standard."
            )
        decays = p.ndim > 1 and not name.endswith("bias")
        found[name] = Traits(name in matrices, decays, rates(role or "vector", growth, id(p) in in_blocks))
    return found
