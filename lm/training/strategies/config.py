"""How a run is spread over processes: one kind per engine, and what each kind cannot do. No engine is imported here."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from lm.config import Slot

if TYPE_CHECKING:
    from lm.training.setting import Sized


class StrategyConfig(Slot, group="strategy"):
    """How a run is spread over processes."""


class SingleConfig(StrategyConfig):
    """One process on one device."""

    kind: Literal["single"] = "single"


class DDPConfig(StrategyConfig):
    """Every rank holds the whole model and averages gradients (torch DistributedDataParallel)."""

    kind: Literal["ddp"] = "ddp"


class FSDPConfig(StrategyConfig):
    """Weights, gradients and optimizer in slices; a block is whole only while it computes (torch FSDP2)."""

    kind: Literal["fsdp"] = "fsdp"


class Zero1Config(StrategyConfig):
    """DeepSpeed: the optimizer's state in slices."""

    kind: Literal["zero1"] = "zero1"


class Zero2Config(StrategyConfig):
    """DeepSpeed: optimizer state and gradients in slices."""

    kind: Literal["zero2"] = "zero2"


class Zero3Config(StrategyConfig):
    """DeepSpeed: optimizer state, gradients and weights in slices."""

    kind: Literal["zero3"] = "zero3"
    persistence_threshold: int = Field(100_000, ge=0)
    """Weights of fewer elements stay whole on every rank."""


class Zero2OffloadConfig(StrategyConfig):
    """DeepSpeed: as zero2, with the optimizer's state and step in the host's memory."""

    kind: Literal["zero2_offload"] = "zero2_offload"


class Zero3OffloadConfig(StrategyConfig):
    """DeepSpeed: as zero3, with the optimizer's state and step in the host's memory."""

    kind: Literal["zero3_offload"] = "zero3_offload"
    persistence_threshold: int = Field(100_000, ge=0)
    """Weights of fewer elements stay whole on every rank."""


STAGES = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero2_offload": 2, "zero3": 3, "zero3_offload": 3, "fsdp": 3}
"""Kind -> what is in slices: 1 optimizer states, 2 gradients too, 3 weights too."""
ZeroConfig = Zero1Config | Zero2Config | Zero3Config | Zero2OffloadConfig | Zero3OffloadConfig


def refusal(cfg: "Sized") -> str | None:
    """Why this strategy cannot train this config, as one sentence with the remedy; None where it can."""
    kind, world = cfg.strategy.kind, cfg.launch.world
    if kind == "single" and world > 1:
        return f"strategy: single is one process, and launch asks for {world}. Use strategy=ddp, fsdp, zero1, zero2 or zero3."
    if cfg.data.global_batch % world:
        return f"data.global_batch={cfg.data.global_batch} is not a multiple of the {world} ranks. Choose a multiple, or other devices."
    for applies, reason in _REFUSED:
        if applies(cfg):
            return f"strategy={kind}: {reason}"
    return None


def _zero(cfg: "Sized") -> bool:
    return cfg.strategy.kind.startswith("zero")


_REFUSED: tuple[tuple[Callable[["Sized"], Any], str], ...] = (
    (
        lambda cfg: cfg.optim.kind == "muon" and (_zero(cfg) or cfg.strategy.kind == "fsdp"),
        "optim=muon works on whole matrices, and this strategy cuts them into slices. Use optim=adamw, or strategy=ddp.",
    ),
    (
        lambda cfg: _zero(cfg) and cfg.trainer.ema_decay is not None,
        "trainer.ema_decay needs weights that the engine keeps to itself. Leave it out, or use strategy=fsdp or ddp.",
    ),
    (
        lambda cfg: _zero(cfg) and cfg.trainer.precision == "bf16-true",
        "DeepSpeed keeps float32 masters of bf16 weights, which is trainer.precision=bf16-mixed. Set that, or fp32.",
    ),
    (
        lambda cfg: cfg.trainer.compile and cfg.strategy.kind.startswith("zero3"),
        "trainer.compile traces through hooks that gather weights, which ZeRO-3 forbids. Leave it out, or use strategy=fsdp.",
    ),
)
