"""How a run is spread over processes: one kind per engine, and what it cannot do. An engine is imported when it is built."""

import importlib.util
import os
import sys
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field

from lm.errors import ConfigError
from lm.schema import Slot, Tree

if TYPE_CHECKING:
    from lm.training.config import Sized, TrainConfig, TrainerConfig
    from lm.training.strategies.single import Single


class StrategyConfig(Slot, group="strategy"):
    """How a run is spread over processes."""

    stage: ClassVar[int] = 0
    """What is in slices: 1 optimizer states, 2 gradients too, 3 weights too."""
    slices_matrices: ClassVar[bool] = False
    """Whether the optimizer sees slices where the model has whole weights."""
    tells_slices: ClassVar[bool] = False
    """Whether it is told which slices, and steps where the ranks can exchange them."""
    offload: ClassVar[bool] = False
    """Whether the optimizer's state and step are in the host's memory."""
    launched: ClassVar[bool] = True
    """Whether processes are started for it."""

    @abstractmethod
    def build(self, cfg: "TrainConfig") -> "Single":
        """Returns the engine; raises ConfigError where it is not installed."""

    def sharing(self, world: int) -> int:
        """Returns how many ranks share the slices of one copy."""
        return world

    def refused(self, cfg: "Sized") -> str | None:
        """Returns what in this config the engine cannot do, with the remedy; None where there is nothing."""
        if cfg.optim.whole_matrices and self.slices_matrices and not (cfg.optim.gathers and self.tells_slices):
            others = "ddp, fsdp, zero1 or zero2" if cfg.optim.gathers else "ddp"
            what = f"{cfg.optim.whole_by} works on whole matrices, and this strategy cuts them into slices"
            return f"{what}. Use optim=adamw, or strategy={others}."
        return None

    def undivided(self, cfg: "Sized") -> str | None:
        """Returns why ranks cannot compute with slices of matrices in this config, with the remedy; None where they can."""
        return f"strategy={self.kind} knows whole matrices only. Use strategy=fsdp"


class SingleConfig(StrategyConfig):
    """One process on one device."""

    launched: ClassVar[bool] = False

    kind: Literal["single"] = "single"

    def build(self, cfg: "TrainConfig") -> "Single":
        from lm.training.strategies.single import Single

        return Single()

    def refused(self, cfg: "Sized") -> str | None:
        if (world := cfg.launch.world) > 1:
            return f"this is one process, and launch asks for {world}. Use strategy=ddp, fsdp, zero1, zero2 or zero3."
        return None


class DDPConfig(StrategyConfig):
    """Every rank holds the whole model and averages gradients (torch DistributedDataParallel)."""

    kind: Literal["ddp"] = "ddp"

    def build(self, cfg: "TrainConfig") -> "Single":
        from lm.training.strategies.ddp import DDP

        return DDP()


class FSDPConfig(StrategyConfig):
    """Weights, gradients and optimizer in slices; a block is whole only while it computes (torch FSDP2)."""

    stage: ClassVar[int] = 3
    slices_matrices: ClassVar[bool] = True
    tells_slices: ClassVar[bool] = True

    kind: Literal["fsdp"] = "fsdp"
    shard: int | None = Field(None, gt=1)
    """Ranks that hold one copy of the weights in slices; others hold further copies, and gradients are summed between them. null: all."""

    def build(self, cfg: "TrainConfig") -> "Single":
        from lm.training.strategies.fsdp import FSDP
        from lm.training.strategies.tensor import DividedFSDP

        return (DividedFSDP if cfg.launch.tensor > 1 else FSDP)(cfg.launch, self.sharing(cfg.launch.world))

    def sharing(self, world: int) -> int:
        return self.shard or world

    def refused(self, cfg: "Sized") -> str | None:
        if (world := cfg.launch.world) % self.sharing(world):
            return f"shard={self.shard} ranks hold a copy of the weights, and launch asks for {world}, no multiple. Choose a divisor of it."
        return super().refused(cfg)

    def undivided(self, cfg: "Sized") -> str | None:
        if self.sharing(cfg.launch.world) % cfg.launch.tensor:
            return f"strategy.shard={self.shard} is not a multiple of it. Choose one"
        if cfg.optim.whole_matrices:
            return f"optim={cfg.optim.kind} works on whole matrices. Use optim=adamw"
        if cfg.adapter is not None:
            return f"adapter={cfg.adapter.kind} is trained beside whole matrices. Use launch.context, or leave it out"
        if cfg.trainer.compile:
            return "trainer.compile has not been tried with slices of matrices. Leave it out"
        return cfg.model.undivided(cfg.launch.tensor)


class ZeroConfig(StrategyConfig):
    """What DeepSpeed's kinds share."""

    slices_matrices: ClassVar[bool] = True

    def build(self, cfg: "TrainConfig") -> "Single":
        """Before the import: DeepSpeed finds no CPU by itself without a warning, and compiles its collectives with ninja, which lies beside
        Python."""
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(f"strategy={self.kind} needs the package deepspeed. Run: pip install 'slotlm[deepspeed]'")
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        from lm.training.strategies.zero import Zero
        from lm.training.strategies.zero3 import Zero3

        return (Zero3 if self.stage == 3 else Zero)(self.zero(cfg.trainer), cfg.optim.clip, cfg.trainer.precision != "fp32")

    def zero(self, trainer: "TrainerConfig") -> Tree:
        """Returns DeepSpeed's `zero_optimization`."""
        return {"stage": self.stage} | ({"offload_optimizer": {"device": "cpu"}} if self.offload else {})

    def refused(self, cfg: "Sized") -> str | None:
        if cfg.trainer.ema_decay is not None:
            return "trainer.ema_decay needs weights that the engine keeps to itself. Leave it out, or use strategy=fsdp or ddp."
        if cfg.trainer.precision == "bf16-true":
            return "DeepSpeed keeps float32 masters of bf16 weights, which is trainer.precision=bf16-mixed. Set that, or fp32."
        return super().refused(cfg)


class Zero1Config(ZeroConfig):
    """DeepSpeed: the optimizer's state in slices."""

    stage: ClassVar[int] = 1
    tells_slices: ClassVar[bool] = True

    kind: Literal["zero1"] = "zero1"


class Zero2Config(ZeroConfig):
    """DeepSpeed: optimizer state and gradients in slices."""

    stage: ClassVar[int] = 2
    tells_slices: ClassVar[bool] = True

    kind: Literal["zero2"] = "zero2"


class Zero2OffloadConfig(ZeroConfig):
    """DeepSpeed: as zero2, with the optimizer's state and step in the host's memory."""

    stage: ClassVar[int] = 2
    offload: ClassVar[bool] = True

    kind: Literal["zero2_offload"] = "zero2_offload"


class WeightsInSlices(ZeroConfig):
    """What DeepSpeed's kinds share that cut the weights too."""

    stage: ClassVar[int] = 3

    persistence_threshold: int = Field(100_000, ge=0)
    """Weights of fewer elements stay whole on every rank."""

    def zero(self, trainer: "TrainerConfig") -> Tree:
        """Its own form of a linear layer adds the bias in place, to a product that the selective form of recompute keeps."""
        linear: Tree = {"memory_efficient_linear": False} if trainer.recompute == "selective" else {}
        return super().zero(trainer) | linear | {"stage3_param_persistence_threshold": self.persistence_threshold}

    def refused(self, cfg: "Sized") -> str | None:
        if cfg.objective.own_answers:
            drawn = f"objective={cfg.objective.kind} draws answers within a step, and ZeRO-3 keeps weights that it gathered for those"
            return f"{drawn}, which have no gradient. Use strategy=fsdp or ddp."
        if cfg.trainer.compile:
            return "trainer.compile traces through hooks that gather weights, which ZeRO-3 forbids. Leave it out, or use strategy=fsdp."
        return super().refused(cfg)


class Zero3Config(WeightsInSlices):
    """DeepSpeed: optimizer state, gradients and weights in slices."""

    kind: Literal["zero3"] = "zero3"


class Zero3OffloadConfig(WeightsInSlices):
    """DeepSpeed: as zero3, with the optimizer's state and step in the host's memory."""

    offload: ClassVar[bool] = True

    kind: Literal["zero3_offload"] = "zero3_offload"
