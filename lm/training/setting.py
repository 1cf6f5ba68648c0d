"""What a run's memory on one rank depends on, out of its config: for `lm show` and `lm train check=true`."""

from typing import Protocol

from lm.data.kinds import DataConfig, ObjectiveConfig
from lm.data.loader import split
from lm.data.rows.base import LikelihoodConfig
from lm.nn.cost.memory import Setting
from lm.nn.loss import CHUNK
from lm.training.config import LaunchConfig, TrainerConfig
from lm.training.optim.base import OptimConfig
from lm.training.strategies.config import StrategyConfig


class Sized(Protocol):
    """The parts of a TrainConfig that decide how a model of some size fits a rank."""

    @property
    def data(self) -> DataConfig: ...
    @property
    def objective(self) -> ObjectiveConfig: ...
    @property
    def optim(self) -> OptimConfig: ...
    @property
    def trainer(self) -> TrainerConfig: ...
    @property
    def strategy(self) -> StrategyConfig: ...
    @property
    def launch(self) -> LaunchConfig: ...


def setting(cfg: Sized) -> Setting:
    """As training sets it up. Raises ConfigError where the ranks do not divide the rows of a step."""
    trainer, world = cfg.trainer, cfg.launch.world
    return Setting(
        micro_batch=split(cfg.data.global_batch, world, trainer.micro_batch)[0],
        seq_len=cfg.data.seq_len,
        chunk=cfg.objective.chunk if isinstance(cfg.objective, LikelihoodConfig) else CHUNK,
        precision=trainer.precision,
        states=cfg.optim.state_bytes(2 if trainer.precision == "bf16-true" else 4),
        checkpoint_every=trainer.checkpoint_blocks or 0,
        stage=cfg.strategy.stage,
        world=world,
    )
