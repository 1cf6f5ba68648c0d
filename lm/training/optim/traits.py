"""What an optimizer is told about each weight: whether it decays, its own settings, and the parametrization's factors on its rates."""

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from lm.adapters.adapter import adapting
from lm.errors import ConfigError
from lm.nn.model_config import ModelConfig
from lm.nn.parametrization import Growth, Role
from lm.nn.transformer import LM
from lm.schema import Config
from lm.spelling import means


class Rates(NamedTuple):
    """Factors that the parametrization puts on one weight's optimizer settings. All are 1 at the base size."""

    adam: float = 1.0
    """Factor on AdamW's learning rate."""
    muon: float = 1.0
    """Factor on Muon's learning rate."""
    eps: float = 1.0
    """Factor on AdamW's eps, which has to scale as the weight's gradient does."""


class GroupConfig(Config):
    """Weights with settings of their own."""

    match: str
    """Their names: a pattern, or parts of them, such as embed, blocks.0, attention.q, '*.bias'."""
    lr: float | None = Field(None, gt=0)
    """Peak learning rate. null: that of the others."""
    lr_factor: float | None = Field(None, gt=0)
    """Factor on the peak learning rate that they have without the group, which follows where that one is changed or tuned. Under Muon an
    embedding has optim.embed_lr, or optim.adam_lr."""
    weight_decay: float | None = Field(None, ge=0)
    """Decay of matrices and embeddings among them. null: that of the others."""

    @model_validator(mode="after")
    def _sets_something(self) -> Self:
        if self.lr is None and self.lr_factor is None and self.weight_decay is None:
            raise ValueError(f"match={self.match} has neither lr, lr_factor nor weight_decay. Set one of them, or drop the group.")
        if self.lr is not None and self.lr_factor is not None:
            raise ValueError(f"match={self.match} has both lr={self.lr:g} and lr_factor={self.lr_factor:g}. Leave one out.")
        return self


class Traits(NamedTuple):
    """How the optimizer treats one weight. Found before an engine cuts the weight, since a slice's shape no longer tells."""

    matrix: bool
    """Whether it is one of the blocks' matrices, or a stack of them."""
    decays: bool
    """Whether weight decay applies, as it does not to norms, biases and other vectors."""
    rates: Rates = Rates()
    lr: float | None = None
    """Peak learning rate that the weight's group names. None: the optimizer's."""
    weight_decay: float | None = None
    """Decay that the weight's group names. None: the optimizer's."""
    factor: float = 1.0
    """Factor on the rate by the weight's group, and by optim.layer_decay: the smaller, the further below the head."""
    table: bool = False
    """Whether its rows are looked up, by a token or by several."""

    @property
    def plain(self) -> bool:
        """Says whether the optimizer's own rates apply to this weight unchanged."""
        return self.lr is None and self.factor == 1 and self.rates.adam == 1 == self.rates.muon

    def peak(self, lr: float, factor: float) -> float:
        """Returns the weight's peak rate.  lr: the optimizer's; factor: the one of `rates` that applies."""
        return (lr if self.lr is None else self.lr) * self.factor * factor

    def decay(self, weight_decay: float, factor: float) -> float:
        """Returns the weight's decay. The optimizer multiplies it by the rate, so it is divided by the factor of `rates` on that rate."""
        found = weight_decay if self.weight_decay is None else self.weight_decay
        return found / factor if self.decays else 0.0


def rates(role: Role, growth: Growth, in_block: bool) -> Rates:
    """Returns the factors of a weight in a model that is `growth` times the base size: m times as wide, l times as deep.

    AdamW moves every element equally far, so a weight that sums m times as many inputs takes 1/m of the rate. Muon's update has the same
    spectral norm at any width already, and a matrix to a few scores takes 1/sqrt(m) of its rate (Yang et al. 2023, arXiv:2310.17813).
    Gradients, hence eps, scale by 1/m past the head's multiplier and by 1/l within a branch; a router's gradient sums m of them.
    """
    m, depth = growth.width, growth.depth if in_block else 1.0
    if role == "vector":
        return Rates(eps=1 / (m * depth))
    return Rates(1 / m, 1.0, 1 / (m * depth)) if role == "hidden" else Rates(1 / m, 1 / math.sqrt(m), 1 / depth)


def traits_of(model: LM, groups: Sequence[GroupConfig] = (), layer_decay: float = 1.0) -> dict[str, Traits]:
    """Returns the traits of all weights by name; call it while they are whole. layer_decay: factor on the rate per block below the head.

    Raises ConfigError for a group that matches no trained weight, and, where the parametrization needs it, for a weight whose initializer
    does not tell whether it reads the width.
    """
    layers = _layers(model, layer_decay)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    for group in groups:
        if not any(means(group.match, name) for name in trained):
            raise unnamed("optim.groups", "weight that is trained", group.match, trained, model.cfg)
    growth, roles, matrices, tables, added = model.cfg.growth(), model.roles(), model.matrices(), model.tables(), adapting(model)
    in_blocks = {id(p) for unit in model.units() for p in unit.parameters()}
    found = {}
    for name, p in model.named_parameters():
        if (role := roles[name]) is None and name not in added and growth != Growth():
            raise ConfigError(
                f"model.parametrization={model.cfg.parametrization.kind}: {name} has an initializer of its own, which does not tell"
                " whether it reads the width. Use one of lm.nn.init, or parametrization=standard."
            )
        decays = p.ndim > 1 and not name.endswith("bias")
        own = next((group for group in groups if means(group.match, name)), None)
        lr, weight_decay, factor = (own.lr, own.weight_decay, own.lr_factor or 1.0) if own else (None, None, 1.0)
        factors = rates(role or "vector", growth, id(p) in in_blocks)  # an adapter learns at the same rate at any width
        found[name] = Traits(name in matrices, decays, factors, lr, weight_decay, factor * layers.get(id(p), 1.0), name in tables)
    return found


def unnamed(key: str, what: str, pattern: str, names: Sequence[str], model: ModelConfig) -> ConfigError:
    """Returns the error for a pattern that no weight's name fits, with the names that are near.  key: the option that holds the pattern;
    what: weights, as 'weight that is ...'."""
    if model.head.tied and means(pattern, "head.weight"):
        near = "The head is the embedding (model.head.tied=true): name embed.weight"
    else:
        near = f"Near are {', '.join(get_close_matches(pattern, names, 5, 0))}"
    return ConfigError(f"{key}: no {what} has a name like '{pattern}'. {near}.")


def _layers(model: LM, decay: float) -> dict[int, float]:
    """Returns the rate factors of parameters by id: in a stack of l blocks decay^(l - i) for block i, counted from 0, and decay^(l + 1) for
    what comes before the blocks; parameters after the blocks are absent: 1 (Clark et al. 2020, arXiv:2003.10555, appendix B)."""
    found: dict[int, float] = {}
    for stack in model.stacks() if decay != 1 else []:
        n = len(stack.blocks)
        for part in (model.embed, stack.ngrams, stack.position, stack.segment, stack.embed_norm, stack.widen, stack.smear, stack.per_layer):
            found |= {id(p): decay ** (n + 1) for p in (part.parameters() if part is not None else ())}
        for i, block in enumerate(stack.blocks):
            found |= {id(p): decay ** (n - i) for p in block.parameters()}
    return found
