"""Muon for matrices and AdamW for the rest, as one optimizer. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: singular values land in about 0.7 to 1.2 after 5 steps
STEPS = 5


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """U V^T of each matrix = U S V^T in the batch, nearly: 5 quintic Newton-Schulz steps in `dtype`.

    matrices: (n, rows, columns).  The batch is one chain of large products, where torch.optim.Muon loops over matrices.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def fast_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies it (on an AVX512-BF16 core about 4 times as fast as float32), else float32."""
    native = torch.cpu.get_capabilities().get("avx512_bf16", False) if device.type == "cpu" else torch.cuda.is_bf16_supported()
    return torch.bfloat16 if native else torch.float32


class MuonAdamW(torch.optim.Optimizer):
    """Groups with a `momentum` are Muon's, the others AdamW's.

    A step with `found_inf` = 1 leaves weights and state untouched, without waiting for the device.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            if "momentum" in group:
                self._muon(params, group)
            else:
                self._adamw(params, group)
        return loss

    def _muon(self, params: list[Tensor], group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for p in params:
            by_shape.setdefault(p.shape, []).append(p)
        for same in by_shape.values():
            self._muon_batch(same, group)

    def _muon_batch(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p]["momentum_buffer"] for p in params]
        grads, old = torch.stack([_grad(p) for p in params]).float(), torch.stack(states)  # (n, rows, columns)
        momentum = old.lerp(grads, 1 - group["momentum"])
        update = orthogonalize(grads.lerp_(momentum, group["momentum"]), fast_dtype(old.device)).float()  # Nesterov
        rows, columns = params[0].shape
        weights = torch.stack(params)
        stepped = weights.float() * (1 - group["lr"] * group["weight_decay"])
        stepped.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)
        torch._foreach_copy_(states, self._unless_skipped(old, momentum).unbind())
        torch._foreach_copy_(params, self._unless_skipped(weights, stepped.to(weights.dtype)).unbind())

    def _unless_skipped(self, old: Tensor, new: Tensor) -> Tensor:
        return new if self.found_inf is None else torch.where(self.found_inf.bool(), old, new)

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in params]
        adamw(
            params,
            [_grad(p) for p in params],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad
