"""DeepSpeed's kinds of strategies, in DeepSpeed's terms: https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training"""

import hashlib
import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch.torch_version import TorchVersion

from lm.errors import ConfigError
from lm.schema import Tree
from lm.training.strategies.config import StrategyConfig

if TYPE_CHECKING:
    from lm.training.config import TrainConfig, TrainSetup
    from lm.training.strategies.base import Strategy

OLDEST = "0.19.8"
"""The DeepSpeed that first tells a norm that is not finite on one rank alone. Before, such a step went unnoticed."""

_AHEAD = ("persistence_threshold", "prefetch_bucket_size")  # keep weights whole, or gather them ahead of their use
_MOST = 10**12


class ZeroConfig(StrategyConfig):
    """What DeepSpeed's kinds share."""

    slices_matrices = True

    reduce_bucket_size: int = Field(500_000_000, gt=0, le=_MOST)
    """Elements of gradients that the ranks sum at a time. Fewer take less memory and more collectives."""

    def require(self) -> None:
        remedy = "Run: pip install 'slotlm[deepspeed]'"
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(f"strategy: kind={self.kind} needs the package deepspeed. {remedy}")
        if TorchVersion(found := version("deepspeed")) < OLDEST:
            raise ConfigError(f"strategy: kind={self.kind} needs deepspeed {OLDEST} or newer, and {found} is installed. {remedy}")

    def build(self, cfg: "TrainConfig") -> "Strategy":
        """Sets up the environment before importing DeepSpeed: it warns where it has to find the CPU by itself, and compiles its collectives
        with ninja, which lies beside the Python executable and so must be on PATH."""
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if (lacking := self.why_not_here(cfg)) is not None:
            raise ConfigError(f"strategy.{lacking}")
        from lm.training.strategies.zero import Zero
        from lm.training.strategies.zero3 import Zero3

        casts = cfg.trainer.precision != "fp32"
        return (Zero3 if self.stage == 3 else Zero)(self.zero(cfg), cfg.optim.clip, casts, cfg.launch.timeout_s)

    def zero(self, cfg: "TrainConfig") -> Tree:
        """Returns DeepSpeed's `zero_optimization`."""
        offload: Tree = {"offload_optimizer": {"device": "cpu"}} if self.offload else {}
        return {"stage": self.stage, "reduce_bucket_size": self.reduce_bucket_size} | offload

    def why_not_here(self, cfg: "TrainConfig") -> str | None:
        """Returns which option needs something that this machine lacks, with the remedy; None where nothing is missing."""
        return None

    def why_not(self, cfg: "TrainSetup") -> str | None:
        if cfg.averaged_by is not None:
            return f"{cfg.averaged_by} needs weights that the engine keeps to itself. Leave it out, or use strategy=fsdp or ddp."
        if cfg.trainer.precision == "fp16-mixed":
            return (
                "float16 needs a loss scale, which DeepSpeed's engine would not know. Set trainer.precision=bf16-mixed, or strategy=fsdp."
            )
        if cfg.trainer.precision == "bf16-true":
            return "DeepSpeed keeps float32 masters of bf16 weights, which is trainer.precision=bf16-mixed. Set that, or fp32."
        if cfg.optim.coded_by is not None:
            what = f"{cfg.optim.coded_by} keeps states in blocks of a weight, and DeepSpeed cuts weights and states into slices of its own"
            return f"{what}. Leave it out, or use strategy=fsdp or ddp."
        return super().why_not(cfg)


class WeightsWhole(ZeroConfig):
    """What DeepSpeed's kinds share that leave the weights whole."""

    allgather_bucket_size: int = Field(500_000_000, gt=0, le=_MOST)
    """Elements of stepped weights that the ranks send each other at a time."""

    def zero(self, cfg: "TrainConfig") -> Tree:
        return super().zero(cfg) | {"allgather_bucket_size": self.allgather_bucket_size}


class Zero1Config(WeightsWhole):
    """DeepSpeed: the optimizer's state in slices."""

    stage = 1
    tells_slices = True

    kind: Literal["zero1"] = "zero1"


class Zero2Config(WeightsWhole):
    """DeepSpeed: optimizer state and gradients in slices."""

    stage = 2
    tells_slices = True

    kind: Literal["zero2"] = "zero2"


class Zero2OffloadConfig(WeightsWhole):
    """DeepSpeed: as zero2, with the optimizer's state and step in the host's memory."""

    stage = 2
    offload = True

    kind: Literal["zero2_offload"] = "zero2_offload"


class WeightsInSlices(ZeroConfig):
    """What DeepSpeed's kinds share that cut the weights too."""

    stage = 3

    persistence_threshold: int = Field(100_000, ge=0)
    """Weights of fewer elements stay whole on every rank."""
    prefetch_bucket_size: int = Field(50_000_000, ge=0, le=_MOST)
    """Elements of weights that are gathered ahead of their use. 0: none."""
    sub_group_size: int = Field(1_000_000_000, gt=0, le=_MOST)
    """Elements that the optimizer steps at a time."""
    hpz_partition_size: int = Field(1, gt=0)
    """Ranks that keep a further copy of the weights in slices between forward and backward, which gathers them from these alone: those of
    a machine (hpZ of ZeRO++, Wang et al. 2023, arXiv:2306.10209). 1: no copy."""
    quantized: list[Literal["weights", "gradients"]] = []
    """What the ranks send rounded: weights to 8 bits (qwZ of ZeRO++), gradients between machines to 4 (qgZ). On GPUs only."""

    def zero(self, cfg: "TrainConfig") -> Tree:
        """With recompute=selective a block must gather as much again in the backward as it has in the forward, since what is kept is told
        by the order of operations: no weights stay whole or are gathered ahead. Nor is a bias added in place to a kept product, as by
        DeepSpeed's memory-efficient linear layer."""
        alike: Tree = {
            "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0,
            "memory_efficient_linear": False,
        }  # fmt: skip
        sizes = {
            "stage3_param_persistence_threshold": self.persistence_threshold,
            "stage3_prefetch_bucket_size": self.prefetch_bucket_size,
            "sub_group_size": self.sub_group_size,
            "zero_hpz_partition_size": self.hpz_partition_size,
        }
        rounded = {f"zero_quantized_{what}": True for what in self.quantized}
        return super().zero(cfg) | sizes | rounded | (alike if cfg.trainer.recompute == "selective" else {})

    def why_not_here(self, cfg: "TrainConfig") -> str | None:
        if not self.quantized:
            return None
        if not torch.cuda.is_available():
            return f"quantized={_listed(self.quantized)} is rounded by CUDA kernels, and there is no GPU. Leave it out."
        if "gradients" in self.quantized and (found := torch.cuda.device_count()) != cfg.launch.devices:
            return (
                f"quantized={_listed(self.quantized)} takes the ranks of a machine to be as many as its GPUs, {found}, and launch.devices="
                f"{cfg.launch.devices}. Set that to {found}, or CUDA_VISIBLE_DEVICES to {cfg.launch.devices} of them."
            )
        return None

    def _sets(self, key: str) -> bool:
        """Whether a size is another than it would be, and not 0."""
        return getattr(self, key) not in (0, type(self).model_fields[key].default)

    def why_not(self, cfg: "TrainSetup") -> str | None:
        if cfg.objective.own_answers:
            drawn = f"objective={cfg.objective.kind} draws answers within a step, and ZeRO-3 keeps weights that it gathered for those"
            return f"{drawn}, which have no gradient. Use strategy=fsdp or ddp."
        if cfg.trainer.compile:
            return "trainer.compile traces through hooks that gather weights, which ZeRO-3 forbids. Leave it out, or use strategy=fsdp."
        if cfg.trainer.recompute == "selective" and (given := next((key for key in _AHEAD if self._sets(key)), None)):
            rule = "with trainer.recompute=selective each weight is gathered when it is used, and let go"
            return f"{given}={getattr(self, given)}: {rule}. Leave it out, or use trainer.recompute=block."
        if (world := cfg.launch.world) % self.hpz_partition_size:
            return f"hpz_partition_size={self.hpz_partition_size} does not divide the {world} ranks of launch. Choose a divisor."
        if self.quantized and cfg.trainer.device == "cpu":
            return f"quantized={_listed(self.quantized)} is rounded by CUDA kernels, and trainer.device=cpu. Leave it out."
        if "gradients" in self.quantized and cfg.launch.nodes == 1:
            return "quantized=[gradients] rounds what machines send each other, and launch.nodes=1. Leave it out."
        return super().why_not(cfg)


class Zero3Config(WeightsInSlices):
    """DeepSpeed: optimizer state, gradients and weights in slices."""

    kind: Literal["zero3"] = "zero3"


class Zero3OffloadConfig(WeightsInSlices):
    """DeepSpeed: as zero3, with the optimizer's state and step in the host's memory, or its state in files."""

    offload = True

    kind: Literal["zero3_offload"] = "zero3_offload"
    nvme: str | None = None
    """Folder on a fast disk of each machine for the optimizer's state, of which the host's memory then holds `sub_group_size` elements at
    a time (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857). null: the host's memory holds all."""

    @property
    def beside(self) -> str:
        return "files" if self.nvme is not None else super().beside

    def zero(self, cfg: "TrainConfig") -> Tree:
        """On NVMe each run has its own folder, named by its run folder, so a resumed run has the same one."""
        found = super().zero(cfg)
        if self.nvme is not None:
            run = hashlib.blake2b(str(cfg.run.folder.absolute()).encode(), digest_size=8).hexdigest()
            found["offload_optimizer"] = {"device": "nvme", "nvme_path": str(Path(self.nvme) / f"lm-{run}")}
        return found

    def why_not_here(self, cfg: "TrainConfig") -> str | None:
        if self.nvme is not None:
            if not Path(self.nvme).is_dir():
                return f"nvme={self.nvme} is not a directory here, and each machine needs it for the optimizer's state. Make it."
            from deepspeed.ops.op_builder import AsyncIOBuilder

            if not AsyncIOBuilder().is_compatible():
                return (
                    f"nvme={self.nvme} is read by DeepSpeed's async_io, which is compiled with libaio, not found here. Install libaio-dev"
                    " (or libaio-devel), or leave strategy.nvme out."
                )
        return super().why_not_here(cfg)


def _listed(names: list[Literal["weights", "gradients"]]) -> str:
    return f"[{','.join(names)}]"
