"""Float8 training: has the linear layers of a built model multiply in float8."""

import torch

from lm.errors import ConfigError
from lm.nn.linear import AskedLinear, Linear, Out
from lm.nn.transformer import LM
from lm.ops.float8 import ROUND, by_float8

_NEEDED = (8, 9)  # compute capability: Ada, Hopper and newer


def require_float8() -> None:
    """Raises ConfigError where the GPU has no float8 products."""
    if torch.version.hip is not None or torch.cuda.get_device_capability() < _NEEDED:
        name = torch.cuda.get_device_name()
        raise ConfigError(f"trainer.float8=true: {name} has no such products; NVIDIA's H100, L40 and newer do. Set trainer.float8=false.")


def multiply_in_float8(model: LM) -> str:
    """Has the linear layers of all blocks multiply in float8, where their widths are multiples of 16, and returns a sentence of how many
    do. Embedding, head, routers and stacked experts stay as they are. Raises ConfigError where no layer fits."""
    inside = [m for unit in model.units() for m in unit.modules() if isinstance(m, Linear) and type(m) in (Linear, Out, AskedLinear)]
    found = [m for m in inside if m.in_features % ROUND == m.out_features % ROUND == 0]
    if not found:
        raise ConfigError(f"trainer.float8=true: no linear layer of a block has widths that are multiples of {ROUND}."
                          " Choose such a d_model, or set trainer.float8=false.")  # fmt: skip
    for module in found:
        module.multiply = by_float8
    return f"{len(found)} of {len(inside)} linear layers in blocks multiply float8"
