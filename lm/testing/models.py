"""Small random models for tests: every tensor is drawn, so that no bias or norm is invisible, and comparisons are in float64."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

from lm.nn.linear import Out
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import LM, build_model
from lm.schema import Config, Slot, Tree, entry_type, members

VOCAB = 61
BASE: Tree = {
    "kind": "decoder", "vocab_size": VOCAB, "max_seq_len": 48, "d_model": 32, "n_layers": 3, "norm": {"kind": "rms"},
    "position": {"kind": "rope"}, "attention": {"kind": "gqa", "n_heads": 4}, "ffn": {"kind": "mlp", "hidden": 40},
}  # fmt: skip
"""A small model, in which a kind takes its place."""


def random_model(cfg: ModelConfig, seed: int = 0) -> LM:
    """Returns a model in eval mode whose every tensor is random, norms and biases too, with logits that no error can hide in."""
    model = build_model(cfg, seed=seed).eval()
    redraw(model, seed)
    with torch.no_grad():  # layers that are run again would add so much to the stream that nothing is left of the tokens
        for each in (part for part in model.modules() if isinstance(part, Out)):
            each.weight.div_(cfg.residual.passes())
    return model


@torch.no_grad()
def redraw(model: torch.nn.Module, seed: int = 0) -> None:
    """Makes every tensor random; a single number, which may be a factor on all there is, by no more than 1/2."""
    source = torch.Generator().manual_seed(seed)
    for _, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=source)
        noise = noise.clamp(-1, 1) if p.numel() == 1 else noise
        p.copy_(noise * 0.9 / p.shape[-1] ** 0.5 * 1.6 if p.ndim >= 2 else p + 0.5 * noise)
    for name, p in model.named_parameters():
        if "embed.weight" in name or "wte" in name or "embed_tokens" in name or "head" in name:
            p.mul_(2.0)


def tokens(b: int, s: int, seed: int = 1) -> Tensor:
    """Returns (b, s) random ones."""
    return torch.randint(0, VOCAB, (b, s), generator=torch.Generator().manual_seed(seed))


class Doubles:
    """Within it, who asks for float32 gets float64: norms, softmax, angles, routers and losses ask for it, on either side.

    Torch's functions that take a dtype are replaced. A TorchFunctionMode would do the same, and takes as long as all that it looks at.
    """

    _BY_OWNER: ClassVar[dict[Any, str]] = {
        torch: "arange as_tensor cumsum empty empty_like eye full_like linspace ones ones_like rand randn softmax sum tensor zeros"
        " zeros_like",
        torch.linalg: "norm vector_norm",
        torch.nn.functional: "log_softmax softmax",
        Tensor: "cumsum log_softmax mean new_empty new_full new_ones new_tensor new_zeros norm prod softmax sum to type",
    }

    def __enter__(self) -> None:
        with torch.device("cpu"):
            torch.empty(0)  # torch lists the functions that make tensors when it first needs them, and shall not find ours
        self._patches = ExitStack()
        for owner, names in self._BY_OWNER.items():
            for name in names.split():
                self._patches.enter_context(patch.object(owner, name, self._widening(getattr(owner, name))))
        self._patches.enter_context(patch.object(Tensor, "float", self._widening(Tensor.float, Tensor.double)))
        self._patches.enter_context(
            patch.object(Tensor, "__truediv__", self._widening(Tensor.__truediv__, partial(_ratio, Tensor.__truediv__)))
        )
        self._patches.enter_context(patch.object(torch, "full", self._widening(torch.full, partial(_full, torch.full))))
        self._on = True

    def __exit__(self, *error: object) -> None:
        self._patches.close()
        self._on = False

    def _widening(self, function: Callable[..., Any], instead: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Returns the function as one that takes float64 for float32 as long as the block lasts: a module that is imported in it may keep
        what it finds.  instead: a function that does so."""

        @wraps(function)
        def wider(*args: Any, **kwargs: Any) -> Any:
            if not self._on:
                return function(*args, **kwargs)
            return (instead or function)(*map(_wider, args), **{key: _wider(value) for key, value in kwargs.items()})

        return wider


def _full(full: Callable[..., Tensor], size: Any, fill_value: Any, **options: Any) -> Tensor:
    """torch.full whose dtype, where none is asked for and the value is a float, is float64: the value may be float64's least."""
    return full(size, fill_value, **({"dtype": torch.float64} if isinstance(fill_value, float) else {}) | options)


def _ratio(divide: Callable[..., Tensor], a: Tensor, b: Any) -> Tensor:
    """Of whole numbers is of float64."""
    whole = not a.is_floating_point() and not a.is_complex() and isinstance(b, int)
    return divide(a.double() if whole else a, b)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def same(found: Tensor, expected: Tensor, what: str = "") -> None:
    """AssertionError unless they agree within 1e-9 of the size of what is expected, both in float64."""
    assert found.dtype == expected.dtype == torch.float64
    size = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found / size, expected / size, rtol=0.0, atol=1e-9, msg=lambda m: f"{what}: {m}")


def slot_of(owner: type[Config], config: Slot) -> str | None:
    """Returns the field of this config that is of the same slot; None where there is none."""
    for name, field in owner.model_fields.items():
        for member in members(entry_type(field.annotation) or field.annotation):
            if isinstance(member, type) and issubclass(member, Slot) and isinstance(config, member):
                return name
    return None
