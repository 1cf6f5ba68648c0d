"""Initial weights: each parameter from a generator of its own, so that every sharding and every ablation pair starts alike."""

import hashlib
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.nn.parametrization import Growth, Role
from lm.ops.defaults import device_unset
from lm.schema import Config


class InitConfig(Config):
    """How weights are drawn; every parameter from its own generator, seeded by (seed, name)."""

    std: float = Field(0.02, gt=0)
    """Standard deviation of embeddings, and of matrices where fan_in is false."""
    fan_in: bool = False
    """Matrices get std 1 / sqrt(inputs) instead."""
    out_scale: float | None = Field(None, ge=0)
    """Factor on projections that write to the residual; 0 makes each block start as the identity. null: 1 / sqrt(sublayers
    that write there), 2 a block and 3 with cross-attention."""


@dataclass(frozen=True)
class InitContext:
    """What an initializer may depend on beside the shape of its parameter."""

    cfg: InitConfig
    growth: Growth
    out_scale: float
    source: torch.Generator

    def normal(self, shape: torch.Size, std: float) -> Tensor:
        """Returns independent normal numbers, float32 on the CPU (which DeepSpeed, while it slices, takes for the GPU unless told)."""
        return torch.randn(shape, generator=self.source, device="cpu") * std


Initializer = Callable[[torch.Size, InitContext], Tensor]
"""The initial values of a parameter of this shape."""


def zeros(shape: torch.Size, init: InitContext) -> Tensor:
    """0: a bias, or a weight that is added to 1."""
    return torch.zeros(shape)


def ones(shape: torch.Size, init: InitContext) -> Tensor:
    """1: the weight of a norm."""
    return torch.ones(shape)


def halves(shape: torch.Size, init: InitContext) -> Tensor:
    """1/2: the shares of two summands."""
    return torch.full(shape, 0.5)


def embedding(shape: torch.Size, init: InitContext) -> Tensor:
    """N(0, std^2): a table whose rows are looked up."""
    return init.normal(shape, init.cfg.std)


def by_inputs(shape: torch.Size, init: InitContext) -> Tensor:
    """N(0, 1 / inputs), whatever `fan_in` says: a sum over few inputs gets the variance of one of them.  shape: (.., inputs)."""
    return init.normal(shape, 1 / math.sqrt(shape[-1]))


def matrix(shape: torch.Size, init: InitContext) -> Tensor:
    """N(0, std^2 / m), or N(0, 1 / inputs) with `fan_in`; m: the width as a multiple of the base width.  shape: (.., outputs, inputs)."""
    return init.normal(shape, _std(shape, init))


def into_residual(shape: torch.Size, init: InitContext) -> Tensor:
    """`matrix`, times out_scale."""
    return init.normal(shape, _std(shape, init) * init.out_scale)


def into_logits(shape: torch.Size, init: InitContext) -> Tensor:
    """`matrix` as at the base width: at other widths the head has a multiplier."""
    return init.normal(shape, _std(shape, init) * math.sqrt(init.growth.width))


def into_scores(shape: torch.Size, init: InitContext) -> Tensor:
    """`matrix` / sqrt(m): from the width to a few scores, such as a router's, without a multiplier behind them."""
    return init.normal(shape, _std(shape, init) / math.sqrt(init.growth.width))


def zero_scores(shape: torch.Size, init: InitContext) -> Tensor:
    """0, of a matrix that learns as one of `into_scores` does."""
    return torch.zeros(shape)


def _std(shape: torch.Size, init: InitContext) -> float:
    return 1 / math.sqrt(shape[-1]) if init.cfg.fan_in else init.cfg.std / math.sqrt(init.growth.width)


_ROLES: dict[Initializer, Role] = {matrix: "hidden", into_residual: "hidden", into_scores: "scores", zero_scores: "scores"}
_ROLES |= dict.fromkeys((zeros, ones, halves, embedding, by_inputs, into_logits), "vector")


class Declares:
    """What a module of ours declares of its parameters, by name, where their shape does not tell."""

    initializers: ClassVar[Mapping[str, Initializer]] = {}
    """What returns their initial values, where `initializer_of` has another default."""
    self_updated: ClassVar[tuple[str, ...]] = ()
    """Those that the model updates itself, from what it counts, and no optimizer: they have requires_grad=False and stay float32."""
    adapting: ClassVar[tuple[str, ...]] = ()
    """Those of an adapter, which are not the model's own."""
    silent: bool = False
    """Whether an adapter adds nothing."""

    def named_initializers(self) -> Mapping[str, Initializer]:
        """Returns `initializers`; modules whose initializers depend on their config override this."""
        return self.initializers


def initializer_of(module: nn.Module, name: str, parameter: Tensor) -> Initializer:
    """Returns the initializer of this parameter: what its module declares, or else zeros for biases, ones for vectors, `matrix` for linear
    layers and `embedding` for tables."""
    if isinstance(module, Declares) and (declared := module.named_initializers().get(name)):
        return declared
    if name.endswith("bias"):
        return zeros
    if parameter.ndim == 1:
        return ones
    return matrix if isinstance(module, nn.Linear) else embedding


def role_of(module: nn.Module, name: str, parameter: Tensor) -> Role | None:
    """Returns the `Role` of this parameter, which its initializer tells; None for a matrix whose initializer is of another file."""
    return _ROLES.get(initializer_of(module, name, parameter), "vector" if parameter.ndim == 1 else None)


def generator(seed: int, *name: object) -> torch.Generator:
    """A generator that depends on the seed and the name alone, the same on every machine and in every process."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *name))).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@device_unset()
@torch.no_grad()
def init_weights(
    model: nn.Module, cfg: InitConfig, growth: Growth, sublayers: Callable[[str], int], seed: int, names: Container[str] | None = None
) -> None:
    """Draw every parameter, or only those in `names`, in float32 on the CPU.

    Projections into the residual stream are scaled by 1/sqrt(n), where n sublayers add to it: `sublayers` returns n for a parameter's name,
    2 per block, and 3 with cross-attention (GPT-2: Radford et al. 2019, section 2.3). With a base depth, n is that of the base model.
    """
    drawn: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in drawn:  # a tied head is the embedding, which has its draw already
                continue
            drawn.add(id(parameter))
            full = f"{prefix}.{name}"
            if names is None or full in names:
                out_scale = cfg.out_scale if cfg.out_scale is not None else 1 / math.sqrt(sublayers(full) / growth.depth)
                init = InitContext(cfg, growth, out_scale, generator(seed, full))
                parameter.copy_(initializer_of(module, name, parameter)(parameter.shape, init))
