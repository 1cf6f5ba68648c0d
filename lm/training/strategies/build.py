"""From a config to its engine; each is imported only when it is asked for."""

import importlib.util
import os
import sys
from pathlib import Path

import torch

from lm.errors import ConfigError
from lm.training.config import TrainConfig
from lm.training.strategies.config import Zero3Config, Zero3OffloadConfig
from lm.training.strategies.single import Single


def build_strategy(cfg: TrainConfig) -> Single:
    """Raises ConfigError where the engine is not installed."""
    strategy, clip = cfg.strategy, cfg.optim.clip
    if strategy.kind == "single":
        return Single()
    if strategy.kind == "ddp":
        from lm.training.strategies.ddp import DDP

        return DDP()
    if strategy.kind == "fsdp":
        from lm.training.strategies.fsdp import FSDP

        return FSDP(cfg.launch.world)
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f"strategy={strategy.kind} needs the package deepspeed. Run: pip install 'slotlm[deepspeed]'")
    _prepare_for_deepspeed()
    offload = strategy.kind.endswith("offload")
    if isinstance(strategy, Zero3Config | Zero3OffloadConfig):
        from lm.training.strategies.zero3 import Zero3

        return Zero3(clip, strategy.persistence_threshold, offload)
    from lm.training.strategies.zero import Zero

    return Zero(1 if strategy.kind == "zero1" else 2, clip, offload)


def _prepare_for_deepspeed() -> None:
    """Before its import: it finds no CPU by itself without a warning, and compiles its collectives with ninja, which lies beside Python."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
