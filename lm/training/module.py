"""The LightningModule: Lightning runs the loop, moves batches and scales precision; what a step means is decided here."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from lightning import Callback, LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lm.adapters.adapter import n_weights
from lm.cost.count import Counts
from lm.errors import ConfigError
from lm.nn.batch import Batch
from lm.nn.materialize import Fill
from lm.nn.transformer import LM
from lm.ops.ranks.ulysses import ShardedRows
from lm.storage.checkpoint import CheckpointReader, Piece
from lm.training.callbacks.states import load_states
from lm.training.config import TrainConfig
from lm.training.launch.ranks import row_sharding_of
from lm.training.loss_scale import LossScale
from lm.training.numerics import StepJudge
from lm.training.objectives.base import Keeping, build_objective
from lm.training.optim.base import set_lr
from lm.training.plan import counts_of
from lm.training.state import RunState, Saved
from lm.training.strategies.base import Strategy
from lm.training.weights.averages import Averages, averages_of
from lm.training.weights.carried import state_reader
from lm.training.weights.freeze import freeze_untrained, trainable
from lm.training.weights.initial import empty, load_pieces


def step_seed(seed: int, step: int, micro: int, rank: int) -> int:
    """The dropout seed of one micro-batch; a function, so that no generator state has to be saved."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{micro}/{rank}".encode(), digest_size=7).digest(), "little")


def draw_from(seed: int, device: torch.device) -> None:
    """Seeds the generators of the CPU and of this device. torch.manual_seed seeds those of every kind of device, and for each that has
    not begun it notes the whole stack: half a millisecond a step."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


class TrainModule(LightningModule):
    """Loss = sum over tokens / label tokens of the whole step, over all ranks and micro-batches.

    `step` counts finished optimizer steps and is ours: Lightning's counters start at 0 in every process, but for `global_step`. A step
    whose loss or gradient is not finite changes nothing, which is decided on the device, with no host sync.
    """

    run: RunState  # what the callbacks of a run share; a step needs only its length
    averages: Averages | None = None  # of the weights
    sharding: ShardedRows | None = None  # of the rows, where several ranks share each

    def __init__(self, cfg: TrainConfig, model: LM, strategy: Strategy, fill: Fill, reader: CheckpointReader | None) -> None:
        """fill: writes the weights where the strategy builds the model part by part.  reader: reads the checkpoint to resume from."""
        super().__init__()
        self.cfg, self.model, self.strategy, self.fill, self.reader = cfg, model, strategy, fill, reader
        self.step = int(reader.meta["step"]) if reader is not None else 0
        self._saved = {*(dict(model.named_parameters()) if cfg.adapter is None else cfg.adapter.own(model))}  # the rest is the parent's
        model.runs_mtp = cfg.objective.trains_mtp
        frozen = freeze_untrained(model, cfg)
        self._frozen_routers = _frozen_routers(model, frozen if cfg.adapter is None else frozen | model.self_updated().keys())
        self._traits = cfg.optim.traits(model)  # before the strategy shards the weights
        self.n_trained = sum(p.numel() for p in trainable(model).values())
        self.n_frozen = n_weights(model) - self.n_trained
        self.objective = build_objective(cfg)
        self.micro = 0  # finished micro-batches of the current step
        self.stepped = False  # True from the end of a step to the beginning of the next
        self.nll = self.tokens_in_step = torch.zeros(())
        self.metrics: dict[str, Tensor] = {}  # the objective's further metrics of this step, each (2,): sum and count
        self.loads: Tensor | None = None  # (MoE layers, e), tokens per expert of this step
        self.auxiliary: dict[str, Tensor] = {}  # what layers add to the loss of this step, by name, summed as `nll`
        self.grad_norm = torch.zeros(())
        self.verdicts = StepJudge(cfg.numerics.skip_in_a_row)
        self.loss_scale = LossScale() if cfg.trainer.precision == "fp16-mixed" else None

    def configure_model(self) -> None:
        self.strategy.shard(self.model, self.device_mesh, self.fill)
        self.fill = empty

    def configure_optimizers(self) -> Optimizer:
        optimizer = self.cfg.optim.build([*trainable(self.model).items()], self._traits)
        self.strategy.prepare(optimizer, self.judge)
        return optimizer

    def setup(self, stage: str) -> None:
        """Called behind that of the callbacks, which read their states in `on_fit_start`."""
        if self.reader is not None:
            self.restore_callbacks(self.reader)

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError: Lightning's callbacks call this method, also through log_dict, and what it logs would reach no logger."""
        how = f"module.run.journal.record({{'step': module.step, {name!r}: value}})"
        raise ConfigError(f"callbacks: log({name!r}) of Lightning's reaches no logger here. Write {how}, for metrics.jsonl and logger=.")

    def on_fit_start(self) -> None:
        self._rates = _rates(self.trainer.optimizers[0])
        self.verdicts.to(self.device)
        if self.loss_scale is not None:
            self.loss_scale.to(self.device)
        self._frozen_routers = self._frozen_routers.to(self.device)
        self.model.train()
        self.sharding = self.strategy.sharding or row_sharding_of(self.cfg.launch)
        self.strategy.ready(self.trainer.optimizers[0])
        self.averages = averages_of(self.cfg, self.strategy, self.model, self.weights())
        if self.reader is not None:
            self.restore(self.reader)
        elif self.cfg.init_optimizer:
            load_pieces(self._state(), state_reader(self.cfg), "Leave out init_optimizer=true")

    def on_train_epoch_start(self) -> None:
        """A run is one epoch. Another one begins where the loop took an error for the end of the rows, and would read them anew."""
        if self.trainer.current_epoch > 0:
            what = f"a callback or another part of a plugin raised StopIteration after step {self.step}, which a loop takes for its end"
            raise ConfigError(f"train: {what}. Catch it there, or give next() a default.")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called behind that of the callbacks. Sets how many micro-batches the next step has, where that changes."""
        if self.cfg.data.ramp and self.stepped and (n := self.cfg.accumulation.of(self.step)) != self.trainer.accumulate_grad_batches:
            self.trainer.accumulate_grad_batches = n
            self.trainer.fit_loop.epoch_loop.batch_progress.current.reset()  # the loop counts micro-batches from the last change on
            self.strategy.accumulate(n)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return (batch if self.sharding is None else batch.sharded(self.sharding)).to(device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        draw_from(step_seed(self.cfg.seeds.dropout, self.step, self.micro, self.global_rank), self.device)
        self.stepped = False
        if self.micro == 0:
            self.nll = torch.zeros((), device=self.device, dtype=torch.float32)  # bf16-true makes bf16 the default
            self.tokens_in_step = self._label_tokens(batch)
            self.loads, self.auxiliary, self.metrics = None, {}, {}
        launch, n_micro = self.cfg.launch, self.trainer.accumulate_grad_batches
        first_row = (self.micro * launch.data_parallel + self.global_rank // launch.ranks_per_row) * len(batch.tokens)
        sums = self.objective(self.model, batch, self.step, first_row)
        self.micro += 1
        self.nll += sums.nll
        self.metrics = {name: pair + self.metrics.get(name, 0.0) for name, pair in sums.metrics.items()}
        if sums.loads is not None:
            self.loads = sums.loads if self.loads is None else self.loads + sums.loads
        self.auxiliary = {name: loss + self.auxiliary.get(name, 0.0) for name, loss in sums.auxiliary.items()}
        divided_by = self.strategy.divisor(n_micro, self.trainer.world_size)
        mean = sums.total * divided_by / self.tokens_in_step
        return mean if self.loss_scale is None else mean * self.loss_scale.factor

    def _label_tokens(self, batch: Batch) -> Tensor:
        """Returns the label tokens of the step over all ranks. A count of 0 makes the loss NaN, so such a step is judged as not finite."""
        count = torch.full((), float(batch.step_tokens), device=self.device, dtype=torch.float32)  # unlike a copy, no host sync
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(count)
        return count

    @property
    def _complete(self) -> bool:
        """Whether all micro-batches of the step are done. An engine that accumulates by itself is stepped after every micro-batch."""
        return self.micro == self.trainer.accumulate_grad_batches

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if self._complete:
            if self.trainer.world_size > 1:
                for mine in (self.nll, *self.auxiliary.values(), *self.metrics.values()):
                    torch.distributed.all_reduce(mine)
            if self.loss_scale is not None:
                self.loss_scale.unscale(p.grad for p in self.model.parameters() if p.grad is not None)
            self.strategy.clip(self.model, optimizer, self.cfg.optim.clip)
            if self.averages is not None:
                self.averages.before()

    def judge(self, grad_norm: Tensor) -> Tensor:
        """Returns the optimizer's `found_inf`: 1 where this step must change nothing, else 0.  grad_norm: of the full gradient."""
        self.grad_norm = grad_norm
        loss = self.loss()
        overflows = None if self.loss_scale is None else self.loss_scale.judge(loss, grad_norm)
        return self.verdicts.judge(loss, grad_norm, self.tokens_in_step, overflows)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None) -> None:
        """Sets the learning rate, steps, averages the weights and counts the step. Callbacks run right after it and see the new `step`."""
        if _rates(optimizer) != self._rates:
            rule = "each step sets it anew, to peak_lr times the schedule's factor"
            raise ConfigError(f"callbacks: lr was changed between steps, and {rule}. Change it in on_before_optimizer_step, or peak_lr.")
        set_lr(optimizer, self.cfg.schedule.factor(self.step, self.run.max_steps))
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self._rates = _rates(optimizer)
        if self._complete:
            self.strategy.settle()
            self._balance()
            if self.averages is not None:
                self.averages.update(self.step, self.verdicts.refused)
            self.verdicts.count(self.step)
            if self.loss_scale is not None:
                self.loss_scale.count()
            self.micro, self.step, self.stepped = 0, self.step + 1, True

    def _balance(self) -> None:
        """Passes the routers the expert loads of the whole step, for their balancing biases. Equal loads move no bias, so loads are set to
        0 where the step is refused or the bias is frozen."""
        if self.loads is None:
            return
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(self.loads)
        if moved := self.model.self_updated():
            with self.strategy.writing(list(moved.values())):
                self.model.balance(self.loads.masked_fill(self.verdicts.refused | self._frozen_routers, 0.0))

    @cached_property
    def counts(self) -> Counts:
        """Parameters and FLOPs of the model."""
        return counts_of(self.cfg, self.model.cfg)

    def loss(self) -> Tensor:
        """Returns the mean loss in nats over the label tokens of the last step, of all ranks. No collective: a single rank may call it."""
        return self.nll / self.tokens_in_step

    def weights(self) -> Iterator[Piece]:
        """Yields this rank's pieces of the weights that the run saves: the whole model's, or only its adapter's."""
        return (piece for piece in self.strategy.weights(self.model) if piece.name in self._saved)

    def pieces(self) -> Iterator[Piece]:
        """Yields this rank's pieces of a checkpoint: weights, optimizer state, averages and the objective's own."""
        yield from self.weights()
        yield from self._state()
        if self.averages is not None:
            yield from self.averages.pieces()
        if isinstance(self.objective, Keeping):
            yield from self.objective.pieces(self.step)

    def _state(self) -> Iterator[Piece]:
        """Yields this rank's pieces of the optimizer's state."""
        return self.strategy.optimizer(self.model, self.trainer.optimizers[0])

    def restore(self, reader: CheckpointReader) -> None:
        """Loads weights, optimizer state and averages from a checkpoint; setting `step` is left to the caller. With resume.fresh_optimizer
        the state begins anew at the checkpoint that this process resumes; those that it saves have the new state, for a rollback."""
        load_pieces(self.weights(), reader)
        self.strategy.refresh(self.model)
        if self.cfg.resume.fresh_optimizer and self.reader is not None and reader.folder == self.reader.folder:
            self.strategy.ready(self.trainer.optimizers[0])
        else:
            load_pieces(self._state(), reader)
        if self.averages is not None:
            load_pieces(self.averages.pieces(), reader)
        if isinstance(self.objective, Keeping):
            self.objective.resume(reader)
        self.verdicts.streak = reader.meta["counters"].get("skipped_in_a_row", 0)
        if self.loss_scale is not None and (state := reader.meta["counters"].get("loss_scale")) is not None:
            self.loss_scale = LossScale(*state)
            self.loss_scale.to(self.device)

    def restore_callbacks(self, reader: CheckpointReader) -> None:
        """Gives the callbacks their states in a checkpoint, and `trainer.global_step`, which they may ask, its step."""
        saved = Saved.of(reader)
        load_states(self.callbacks, saved.callbacks, self.run.journal.console.say)
        self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = saved.step

    @property
    def callbacks(self) -> list[Callback]:
        """All callbacks of the run, in the order of their calls."""
        trainer: Any = self.trainer  # whose class does not declare them
        return list(trainer.callbacks)

    @contextmanager
    def exported_weights(self) -> Iterator[None]:
        """Inside the block the model has the weights that are validated and exported: the averages where the run keeps any."""
        averaged: AbstractContextManager[None] = self.averages.swapped() if self.averages is not None else nullcontext()
        with averaged, self.trainer.precision_plugin.forward_context():
            yield


def _frozen_routers(model: LM, frozen: set[str]) -> Tensor:
    """Returns (MoE layers, 1) bool: True where the router's balancing bias is frozen."""
    still = frozen & set(model.self_updated())
    return torch.tensor([any(name.startswith(f"{layer}.") for name in still) for layer in model.mixtures()]).unsqueeze(-1)


def _rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]
