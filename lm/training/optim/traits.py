"""What an optimizer is told of each weight: how it is treated, and what the model's parametrization makes of the settings for it."""

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from lm.errors import ConfigError
from lm.nn.parametrization import Growth, Role
from lm.nn.transformer import LM
from lm.schema import Config
from lm.spelling import means


class Rates(NamedTuple):
    """Factors of one weight on what an optimizer is told. All are 1 at the base size."""

    adam: float = 1.0
    """On AdamW's rate."""
    muon: float = 1.0
    """On Muon's rate."""
    eps: float = 1.0
    """On AdamW's eps: as the gradient of a weight."""


class GroupConfig(Config):
    """Weights with settings of their own."""

    match: str
    """Their names: a pattern, or parts of them, such as embed, blocks.0, attention.q, '*.bias'."""
    lr: float | None = Field(None, gt=0)
    """Peak learning rate. null: that of the others."""
    weight_decay: float | None = Field(None, ge=0)
    """Decay of matrices and embeddings among them. null: that of the others."""

    @model_validator(mode="after")
    def _sets_something(self) -> Self:
        if self.lr is None and self.weight_decay is None:
            raise ValueError(f"match={self.match} has neither lr nor weight_decay. Set one of them, or drop the group.")
        return self


class Traits(NamedTuple):
    """Those of one weight. An engine may have cut it when the optimizer is built, so that its shape no longer tells."""

    matrix: bool
    """One of the blocks' matrices, or a stack of them."""
    decays: bool
    """No norm, bias or other vector."""
    rates: Rates = Rates()
    lr: float | None = None
    """In place of the optimizer's, where its group says so."""
    weight_decay: float | None = None
    """In place of the optimizer's, where its group says so."""
    layer: float = 1.0
    """Factor on the rate, by how far below the head."""

    @property
    def plain(self) -> bool:
        """Says whether what the optimizer is told holds as it is."""
        return self.lr is None and self.layer == 1 and self.rates.adam == 1 == self.rates.muon

    def peak(self, lr: float, factor: float) -> float:
        """Returns the peak rate.  lr: of the optimizer; factor: of `rates`."""
        return (lr if self.lr is None else self.lr) * self.layer * factor

    def decay(self, weight_decay: float, factor: float) -> float:
        """Returns the decay, which is a part of the rate and raised where that is lowered by a factor of `rates`."""
        found = weight_decay if self.weight_decay is None else self.weight_decay
        return found / factor if self.decays else 0.0


def rates(role: Role, growth: Growth, in_block: bool) -> Rates:
    """AdamW moves each element as far as any other, so what sums m times as many moves them 1/m as far; Muon's update has the same spectral
    norm at any width already, and a few scores take 1/sqrt(m) of it (Yang et al. 2023, arXiv:2310.17813).

    Gradients are those of a mean loss: 1/m where they pass the head's multiplier, 1/l within a branch; a router's sums m of them.
    """
    m, depth = growth.width, growth.depth if in_block else 1.0
    if role == "vector":
        return Rates(eps=1 / (m * depth))
    return Rates(1 / m, 1.0, 1 / (m * depth)) if role == "hidden" else Rates(1 / m, 1 / math.sqrt(m), 1 / depth)


def traits_of(model: LM, groups: Sequence[GroupConfig] = (), layer_decay: float = 1.0) -> dict[str, Traits]:
    """Returns them by name, of whole weights; experts' biases are stacked, (e, out).  layer_decay: factor on the rate per block below the
    head. Raises ConfigError for a group of no weight that is trained, and for a weight of which nothing tells whether it reads the width,
    where the parametrization asks.
    """
    layers = _layers(model, layer_decay)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    for group in groups:
        if not any(means(group.match, name) for name in trained):
            near = ", ".join(get_close_matches(group.match, trained, 5, 0))
            raise ConfigError(f"optim.groups: no weight that is trained has a name like '{group.match}'. Near are {near}.")
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
        lr, weight_decay = next(((group.lr, group.weight_decay) for group in groups if means(group.match, name)), (None, None))
        factors = rates(role or "vector", growth, id(p) in in_blocks)
        found[name] = Traits(name in matrices, decays, factors, lr, weight_decay, layers.get(id(p), 1.0))
    return found


def _layers(model: LM, decay: float) -> dict[int, float]:
    """Of a stack of l blocks decay^(l - i) for the i-th, counted from 0, and decay^(l + 1) for what is before them; 1 for all behind them
    (Clark et al. 2020, arXiv:2003.10555, appendix B)."""
    found: dict[int, float] = {}
    for stack in model.stacks() if decay != 1 else []:
        n = len(stack.blocks)
        for part in (model.embed, stack.position, stack.segment, stack.embed_norm):
            found |= {id(p): decay ** (n + 1) for p in (part.parameters() if part is not None else ())}
        for i, block in enumerate(stack.blocks):
            found |= {id(p): decay ** (n - i) for p in block.parameters()}
    return found
