"""How a run is spread over processes: one kind per engine, and what it cannot do. An engine is imported when it is built."""

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from lm.schema import Slot

if TYPE_CHECKING:
    from lm.training.config import TrainConfig, TrainSetup
    from lm.training.strategies.base import Strategy


class StrategyConfig(Slot, group="strategy"):
    """How a run is spread over processes."""

    stage: ClassVar[int] = 0
    """What is in slices: 1 optimizer states, 2 gradients too, 3 weights too."""
    slices_matrices: ClassVar[bool] = False
    """Whether the optimizer sees slices where the model has whole weights."""
    tells_slices: ClassVar[bool] = False
    """Whether it is told which slices, and steps where the ranks can exchange them."""
    offload: ClassVar[bool] = False
    """Whether the optimizer's state and step are elsewhere than the weights: `beside`."""
    launched: ClassVar[bool] = True
    """Whether processes are started for it."""

    @property
    def slices_weights(self) -> bool:
        """Whether every rank holds a part of each weight, so that all of them call the model equally often."""
        return self.stage == 3

    @property
    def beside(self) -> str:
        """Where the optimizer's state is kept with `offload`."""
        return "the host's memory"

    @abstractmethod
    def build(self, cfg: "TrainConfig") -> "Strategy":
        """Returns the engine."""

    def require(self) -> None:
        """Raises ConfigError where a package that the engine needs is not installed."""

    def sharing(self, world: int) -> int:
        """Returns over how many of `world` ranks one copy of the model is sliced."""
        return world

    def why_not(self, cfg: "TrainSetup") -> str | None:
        """Returns what the engine cannot do of this config, with the remedy; None where it can do everything."""
        if cfg.optim.whole_matrices and self.slices_matrices and not (cfg.optim.gathers and self.tells_slices):
            others = "ddp, fsdp, zero1 or zero2" if cfg.optim.gathers else "ddp"
            what = f"{cfg.optim.whole_by} works on whole matrices, and this strategy cuts them into slices"
            return f"{what}. Use optim=adamw, or strategy={others}."
        return None

    def why_not_tensor_parallel(self, cfg: "TrainSetup") -> str | None:
        """Returns why ranks cannot compute with slices of matrices in this config, with the remedy; None where they can."""
        return f"strategy={self.kind} knows whole matrices only. Use strategy=fsdp"


class SingleConfig(StrategyConfig):
    """One process on one device."""

    launched = False

    kind: Literal["single"] = "single"

    def build(self, cfg: "TrainConfig") -> "Strategy":
        from lm.training.strategies.base import Strategy

        return Strategy()

    def why_not(self, cfg: "TrainSetup") -> str | None:
        if (world := cfg.launch.world) > 1:
            return f"this is one process, and launch asks for {world}. Use strategy=ddp, fsdp, zero1, zero2 or zero3."
        return None


class DDPConfig(StrategyConfig):
    """Every rank holds the whole model and averages gradients (torch DistributedDataParallel)."""

    kind: Literal["ddp"] = "ddp"

    def build(self, cfg: "TrainConfig") -> "Strategy":
        from lm.training.strategies.ddp import DDP

        return DDP()


class FSDPConfig(StrategyConfig):
    """Weights, gradients and optimizer in slices; a block is whole only while it computes (torch FSDP2)."""

    stage = 3
    slices_matrices = True
    tells_slices = True

    kind: Literal["fsdp"] = "fsdp"
    shard: int | None = Field(None, gt=1)
    """Ranks that hold one copy of the weights in slices; others hold further copies, and gradients are summed between them. null: all."""

    def build(self, cfg: "TrainConfig") -> "Strategy":
        from lm.training.strategies.fsdp import FSDP
        from lm.training.strategies.tensor import DividedFSDP

        return (DividedFSDP if cfg.launch.tensor > 1 else FSDP)(cfg.launch, self.sharing(cfg.launch.world))

    def sharing(self, world: int) -> int:
        return self.shard or world

    def why_not(self, cfg: "TrainSetup") -> str | None:
        if (world := cfg.launch.world) % self.sharing(world):
            return f"shard={self.shard} ranks hold a copy of the weights, and launch asks for {world}, no multiple. Choose a divisor of it."
        if (why := cfg.objective.why_not_in_step()) is not None:
            return f"{why}, and ranks that share weights must call the model equally often. Use ddp, zero1 or zero2."
        return super().why_not(cfg)

    def why_not_tensor_parallel(self, cfg: "TrainSetup") -> str | None:
        if self.sharing(cfg.launch.world) % cfg.launch.tensor:
            return f"strategy.shard={self.shard} is not a multiple of it. Choose one"
        if cfg.adapter is not None:
            return f"adapter={cfg.adapter.kind} is trained beside whole matrices. Use launch.context, or leave it out"
        if cfg.trainer.compile:
            return "trainer.compile has not been tried with slices of matrices. Leave it out"
        return cfg.model.why_not_tensor_parallel(cfg.launch.tensor)
