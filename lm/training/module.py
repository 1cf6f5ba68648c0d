"""The LightningModule: Lightning runs the loop, moves batches and scales precision; what a step means is decided here."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lm.generation.load import load
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.training.callbacks.numerics import StepJudge
from lm.training.config import TrainConfig
from lm.training.objectives.likelihood import build_objective
from lm.training.optim.build import set_lr
from lm.training.optim.schedule import factor
from lm.training.strategies.single import Single
from lm.training.weights import Fill, empty


def step_seed(seed: int, step: int, micro: int, rank: int) -> int:
    """The dropout seed of one micro-batch; a function, so that no generator state has to be saved."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{micro}/{rank}".encode(), digest_size=7).digest(), "little")


class TrainModule(LightningModule):
    """Loss = sum over tokens / label tokens of the whole step, over all ranks and micro-batches.

    `step` counts finished optimizer steps and is ours: Lightning's counters start at 0 in every process. A step whose loss or
    gradient is not finite changes nothing, which is decided on the device, with no host sync.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        model: LM,
        build_optimizer: Callable[[], Optimizer],
        after_step: Callable[[], bool],
        on_start: Callable[[], None],
        step: int = 0,
        strategy: Single | None = None,
        fill: Fill = empty,
    ) -> None:
        super().__init__()
        self.cfg, self.model, self.step = cfg, model, step
        self.build_optimizer, self.after_step, self.on_start = build_optimizer, after_step, on_start
        self.strategy, self.fill = strategy or Single(), fill
        self.objective = build_objective(cfg.objective, cfg.trainer.max_steps, cfg.seed, lambda: load(str(cfg.init_from), "cpu")[0])
        self.micro = 0
        self.nll = self.tokens_in_step = torch.zeros(())
        self.loads: Tensor | None = None  # (MoE layers, e), tokens per expert of this step
        self.grad_norm = torch.zeros(())
        self.verdicts = StepJudge(cfg.numerics.skip_in_a_row)

    def configure_model(self) -> None:
        self.strategy.shard(self.model, self.device_mesh, self.fill)

    def configure_optimizers(self) -> Optimizer:
        optimizer = self.build_optimizer()
        self.strategy.prepare(optimizer, self.judge)
        return optimizer

    def on_train_start(self) -> None:
        self.verdicts.to(self.device)
        self.model.train()
        self.strategy.ready(self.trainer.optimizers[0])
        self.on_start()

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        torch.manual_seed(step_seed(self.cfg.seed, self.step, self.micro, self.global_rank))
        if self.micro == 0:
            self.nll = torch.zeros((), device=self.device, dtype=torch.float32)  # bf16-true makes bf16 the default
            self.tokens_in_step = self._label_tokens(batch)
            self.loads = None
        first_row = (self.global_rank * self.trainer.accumulate_grad_batches + self.micro) * len(batch.tokens)
        sums = self.objective(self.model, batch, self.step, first_row)
        self.micro += 1
        self.nll += sums.nll
        if sums.loads is not None:
            self.loads = sums.loads if self.loads is None else self.loads + sums.loads
        divided_by = self.strategy.divisor(self.trainer.accumulate_grad_batches, self.trainer.world_size)
        return sums.total * divided_by / self.tokens_in_step

    def _label_tokens(self, batch: Batch) -> Tensor:
        """0 makes the loss NaN: a step from which nothing can be learned is judged like any other that is not finite."""
        count = torch.full((), float(batch.step_tokens), device=self.device, dtype=torch.float32)  # unlike a copy, this does not wait
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(count)
        return count

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if self.micro < self.trainer.accumulate_grad_batches:  # an engine that accumulates by itself passes here with every micro-batch
            return
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(self.nll)
        self.strategy.clip(self.model, optimizer, self.cfg.optim.clip, self.judge)

    def judge(self, grad_norm: Tensor) -> Tensor:
        """1 where this step must change nothing, else 0, given the norm of its whole gradient."""
        self.grad_norm = grad_norm
        return self.verdicts.judge(self.loss(), grad_norm, self.tokens_in_step)

    @property
    def bad_step(self) -> Tensor:
        """The last step, where its loss or gradient is not finite, or the one that ended all stepping; else -1."""
        return self.verdicts.last_bad

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None) -> None:
        set_lr(optimizer, factor(self.cfg.schedule, self.step, self.cfg.trainer.max_steps))
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.micro < self.trainer.accumulate_grad_batches:
            return
        self.strategy.after_step(self.judge)
        self._balance()
        self.verdicts.count(self.step)
        self.micro = 0
        self.step += 1
        if self.after_step():
            self.trainer.should_stop = True

    def _balance(self) -> None:
        """Tell the routers the loads of the whole step. Even loads move nothing: those of a step that is not taken become 0."""
        if self.loads is None:
            return
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(self.loads)
        if steered := [p for p in self.model.parameters() if not p.requires_grad]:
            with self.strategy.writing(steered):
                self.model.balance(self.loads.masked_fill(self.verdicts.refused, 0.0))

    def loss(self) -> Tensor:
        """Mean over the label tokens of the last step, all ranks, in nats. No collective: any one rank may ask."""
        return self.nll / self.tokens_in_step
