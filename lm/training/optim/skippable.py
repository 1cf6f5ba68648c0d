"""Optimizers that can skip a step on the device, as torch's fused AdamW does, and SGD as the plainest of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Skippable(Optimizer, ABC):
    """A step with `found_inf` = 1 leaves weights and state bitwise as they were, without waiting for the device."""

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._flag_is_here() and self.found_inf:
            return loss
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step(params, group)
        return loss

    @abstractmethod
    def _step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One update of parameters that have gradients."""

    def _flag_is_here(self) -> bool:
        """On the CPU the flag is read at no cost; elsewhere reading it would wait for the device."""
        return self.found_inf is None or self.found_inf.device.type == "cpu"

    def _write(self, old: list[Tensor], new: list[Tensor] | tuple[Tensor, ...]) -> None:
        """Copy new values over old ones, unless the step is skipped."""
        if not self._flag_is_here():
            assert self.found_inf is not None
            skipped = self.found_inf.bool()
            new = [torch.where(skipped, before, after.to(before.dtype)) for before, after in zip(old, new, strict=True)]
        for before, after in zip(old, new, strict=True):  # not _foreach_copy_, which sharded tensors lack
            before.copy_(after)


class SGD(Skippable):
    """m <- momentum * m + gradient + decay * w;  w <- w - lr * m, computed in float32.

    Not torch's: up to 2.13 its fused SGD leaves most bf16 weights on a CPU unchanged (pytorch issue 191763), and only the fused one
    knows `found_inf`.
    """

    def _step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            assert p.grad is not None
            update = p.grad.float() + group["weight_decay"] * p.float()
            if group["momentum"]:
                momentum = self.state[p]["momentum_buffer"]
                update += group["momentum"] * momentum
                self._write([momentum], [update])
            self._write([p], [p - group["lr"] * update])
