"""DeepSpeed's ZeRO through Lightning, on CUDA and on CPU.  Rajbhandari et al. 2020, arXiv:1910.02054."""

from argparse import Namespace
from typing import Any

import deepspeed
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.nn.transformer import LM
from lm.training.strategies.single import Judge, Single


class _AnyDevice(DeepSpeedStrategy):
    """Lightning's strategy refuses anything but CUDA, where DeepSpeed itself also runs on CPU with gloo."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None) -> tuple[Any, Any]:
        """As in Lightning, but with the local rank where a CPU device has no index."""
        index = self.root_device.index
        where = Namespace(device_rank=self.local_rank if index is None else index)
        weights = [p for p in model.parameters() if p.requires_grad]
        engine, wrapped, _, _ = deepspeed.initialize(
            where, model, optimizer, weights, lr_scheduler=lr_scheduler, config=self.config, dist_init_required=False
        )
        return engine, wrapped


class Zero(Single):
    """The engine accumulates, averages, clips and steps, over flat slices of the weights: no optimizer of matrices works under it."""

    def __init__(self, stage: int, clip: float | None, persistence_threshold: int = 100_000) -> None:
        """persistence_threshold: weights of fewer elements are never split."""
        zero = {"stage": stage, "stage3_param_persistence_threshold": persistence_threshold}
        config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "gradient_clipping": clip or 0.0}
        self.plugin = _AnyDevice(config=config | {"train_micro_batch_size_per_gpu": 1})  # a number for DeepSpeed's logs

    def lightning(self) -> Any:
        return self.plugin

    def shard(self, model: LM, mesh: Any) -> None:
        """The engine splits the weights; the head's must be whole while the chunked loss uses it outside of the head's own forward."""
        deepspeed.zero.register_external_parameter(model, model.head.weight)

    def divisor(self, accumulation: int, world: int) -> int:
        """Lightning divides by the accumulation, and DeepSpeed does so again."""
        return accumulation**2 * world

    def prepare(self, optimizer: Optimizer, judge: Judge) -> None:
        """The engine replaces the parameters by flat slices, whose state begins with their first step."""
        optimizer.state.clear()

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            optimizer.found_inf = judge(self._norm())

        optimizer.register_step_pre_hook(before_step)

    def clip(self, model: nn.Module, optimizer: Optimizer, limit: float | None, judge: Judge) -> None:
        """The engine clips, inside its step."""

    def after_step(self, judge: Judge) -> None:
        judge(self._norm())  # again, for a step that the engine itself has skipped

    def _norm(self) -> Tensor:
        engine: Any = self.plugin.deepspeed_engine
        return torch.as_tensor(engine.optimizer._global_grad_norm, dtype=torch.float32, device=self.plugin.root_device)

    def whole(self, tensor: Tensor) -> Tensor:
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
