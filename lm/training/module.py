"""The LightningModule: Lightning runs the loop, moves batches and scales precision; what a step means is decided here."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lm.nn.batch import Batch
from lm.nn.loss import LossSums
from lm.nn.transformer import DecoderLM
from lm.training.config import TrainConfig
from lm.training.objective import causal_reader
from lm.training.optim import set_lr
from lm.training.schedule import factor


def step_seed(seed: int, step: int, micro: int, rank: int) -> int:
    """The dropout seed of one micro-batch; a function, so that no generator state has to be saved."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{micro}/{rank}".encode(), digest_size=7).digest(), "little")


class TrainModule(LightningModule):
    """Loss = sum over tokens / label tokens of the whole step, over all ranks and micro-batches.

    `step` counts finished optimizer steps and is ours: Lightning's counters start at 0 in every process. A step whose loss or
    gradient is not finite changes nothing, and neither does any step after it: `bad_step` is set on the device, with no host sync.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        model: DecoderLM,
        build_optimizer: Callable[[], Optimizer],
        after_step: Callable[[], bool],
        on_start: Callable[[], None],
        step: int = 0,
    ) -> None:
        super().__init__()
        self.cfg, self.model, self.step = cfg, model, step
        self.build_optimizer, self.after_step, self.on_start = build_optimizer, after_step, on_start
        self.micro = 0
        self.nll = self.tokens_in_step = torch.zeros(())
        self.grad_norm = torch.zeros(())
        self.bad_step = torch.full((), -1, dtype=torch.int64)

    def configure_optimizers(self) -> Optimizer:
        return self.build_optimizer()

    def on_train_start(self) -> None:
        self.bad_step = self.bad_step.to(self.device)
        self.model.train()
        self.on_start()

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        torch.manual_seed(step_seed(self.cfg.seed, self.step, self.micro, self.global_rank))
        if self.micro == 0:
            self.nll = torch.zeros((), device=self.device)
            self.tokens_in_step = self._label_tokens(batch)
        assert batch.labels is not None
        sums: LossSums = self.model(batch, loss=causal_reader(batch.labels, self.cfg.objective))
        self.micro += 1
        self.nll += sums.nll
        # Lightning divides by the accumulation, and averaging over ranks divides by their number: undo both.
        return sums.total * (self.trainer.accumulate_grad_batches * self.trainer.world_size) / self.tokens_in_step

    def _label_tokens(self, batch: Batch) -> Tensor:
        count = torch.tensor(float(batch.step_tokens), device=self.device)
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(count)
        return count.clamp_min(1)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(grads, foreach=True)
        self.grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded gradients give a DTensor
        clip = self.cfg.optim.clip
        if clip is not None:
            torch._foreach_mul_(grads, (clip / (self.grad_norm + 1e-6)).clamp(max=1.0))
        finite = torch.isfinite(self.grad_norm) & torch.isfinite(self.nll)
        self.bad_step = torch.where(finite | (self.bad_step >= 0), self.bad_step, self.step)
        optimizer.found_inf = (self.bad_step >= 0).to(torch.float32)  # type: ignore[attr-defined]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None) -> None:
        set_lr(optimizer, factor(self.cfg.schedule, self.step, self.cfg.trainer.max_steps))
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.micro < self.trainer.accumulate_grad_batches:
            return
        self.micro = 0
        self.step += 1
        if self.after_step():
            self.trainer.should_stop = True

    def loss(self) -> Tensor:
        """Mean over the label tokens of the last step, all ranks, in nats."""
        total = self.nll.clone()
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(total)
        return total / self.tokens_in_step

