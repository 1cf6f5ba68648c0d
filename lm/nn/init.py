"""Initial weights: each parameter from a generator of its own, so that every sharding and every ablation pair starts alike."""

import hashlib
import math
from collections.abc import Callable, Container

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.config import Config
from lm.nn.ffn.experts import Experts
from lm.nn.linear import Out
from lm.nn.norm import RMSNorm, ZeroCenteredRMSNorm


class InitConfig(Config):
    """How weights are drawn; every parameter from its own generator, seeded by (seed, name)."""

    std: float = Field(0.02, gt=0)
    """Standard deviation of embeddings, and of matrices where fan_in is false."""
    fan_in: bool = False
    """Matrices get std 1 / sqrt(inputs) instead."""
    out_scale: float | None = Field(None, ge=0)
    """Factor on projections that write to the residual; 0 makes each block start as the identity. null: 1 / sqrt(sublayers
    that write there), 2 a block and 3 with cross-attention."""


def generator(seed: int, *name: object) -> torch.Generator:
    """A generator that depends on the seed and the name alone, the same on every machine and in every process."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *name))).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def init_weights(
    model: nn.Module, cfg: InitConfig, sublayers: Callable[[str], int], seed: int, names: Container[str] | None = None
) -> None:
    """Draw every parameter, or those of these names, in float32 on the CPU: normal matrices and embeddings, ones for norm weights, zeros
    for biases.

    Projections into the residual are scaled by 1/sqrt(n), n being the sublayers that add to it, which `sublayers` tells of a parameter's
    name: 2 a block, and 3 where it reads a source (GPT-2: Radford et al. 2019, section 2.3).
    """
    drawn: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in drawn:  # a tied head is the embedding, which has its draw already
                continue
            drawn.add(id(parameter))
            full = f"{prefix}.{name}"
            if names is None or full in names:
                out_scale = cfg.out_scale if cfg.out_scale is not None else 1 / math.sqrt(sublayers(full))
                parameter.copy_(_draw(module, name, parameter, cfg, out_scale, generator(seed, full)))


def _draw(module: nn.Module, name: str, parameter: Tensor, cfg: InitConfig, out_scale: float, source: torch.Generator) -> Tensor:
    shape = parameter.shape
    if name.endswith("bias") or name == "sinks" or isinstance(module, ZeroCenteredRMSNorm):
        return torch.zeros(shape)
    if isinstance(module, RMSNorm | nn.LayerNorm):
        return torch.ones(shape)
    std = cfg.std
    if isinstance(module, nn.Linear | Experts):
        std = 1 / math.sqrt(shape[-1]) if cfg.fan_in else std
    if isinstance(module, Out) or (isinstance(module, Experts) and name == "down"):
        std *= out_scale
    return torch.randn(shape, generator=source) * std
