"""Building a model part by part, so that no rank holds the whole model."""

from collections.abc import Callable, Container, Iterator

import torch
from torch import nn

from lm.nn.transformer import LM

Fill = Callable[[LM, Container[str]], None]  # writes the named parameters, which are whole and on a device


def materialized(model: LM, parts: list[nn.Module], device: torch.device, fill: Fill) -> Iterator[nn.Module]:
    """Yields each part of a model on the meta device once it is filled, so that the caller can shard it before the next part is filled;
    at last the model itself, with the weights outside of all parts filled."""
    for part in parts:
        prefix = next(name for name, module in model.named_modules() if module is part)
        names = {f"{prefix}.{name}" for name, p in part.named_parameters() if p.is_meta}
        if names:
            part.to_empty(device=device)
            fill(model, names)
        yield part
    rest = {name for name, p in model.named_parameters() if p.is_meta}
    for module in model.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
    model.tie()
    if rest:
        fill(model, rest)
    yield model
