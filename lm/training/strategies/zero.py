"""DeepSpeed's ZeRO-1 and ZeRO-2 through Lightning, on CUDA and on CPU.  Rajbhandari et al. 2020, arXiv:1910.02054."""

import io
import logging
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.cpp_extension import _get_build_directory

from lm.nn.materialize import Fill
from lm.nn.transformer import LM
from lm.schema import Tree
from lm.storage.checkpoint import ALONE, Piece
from lm.storage.lock import locked
from lm.training.optim.base import CUTS, begin_state
from lm.training.optim.slices import in_a_row
from lm.training.strategies.base import Judge, Strategy

_OF_FILES = ("PinMemoryBuilder", "AsyncIOBuilder")  # the latter loads the former


class _AnyDevice(DeepSpeedStrategy):
    """Lightning's strategy refuses anything but CUDA, where DeepSpeed itself also runs on CPU with gloo."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        with redirect_stdout(io.StringIO()):  # it reports what it has built
            self._compile()
            self._init_deepspeed_distributed()
        engine: Any = deepspeed.comm.comm.cdb  # whose groups would have torch's own timeout
        engine.new_group = partial(torch.distributed.new_group, timeout=self._timeout)

    def _compile(self) -> None:
        """Compiles DeepSpeed's C++ extensions, one process at a time. torch's own lock is a file: if the process that made it is killed,
        every later start waits for it forever, silently. A process that holds our lock knows that such a file is left over."""
        assert self.config is not None
        offload = self.config["zero_optimization"].get("offload_optimizer", {})
        found = map(get_accelerator().create_op_builder, ["ShareMemCommBuilder", *(_OF_FILES if "nvme_path" in offload else ())])
        for builder in found:
            if builder is not None and builder.is_compatible(verbose=False):
                lock = Path(_get_build_directory(builder.name, verbose=False), "lock")
                with locked(lock.with_name("lm.lock"), lambda: None):
                    lock.unlink(missing_ok=True)
                    builder.load(verbose=False)

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None) -> tuple[Any, Any]:
        """As Lightning's method, but with the local rank where the device, a CPU, has no index."""
        index = self.root_device.index
        where = Namespace(device_rank=self.local_rank if index is None else index)
        weights = [p for p in model.parameters() if p.requires_grad]
        engine, wrapped, _, _ = deepspeed.initialize(
            where, model, optimizer, weights, lr_scheduler=lr_scheduler, config=self.config, dist_init_required=False
        )
        return engine, wrapped

    def teardown(self) -> None:
        """Removes the files of an optimizer state offloaded to NVMe: another process cannot use them, and starts from a checkpoint."""
        super().teardown()
        assert self.config is not None
        if (folder := self.config["zero_optimization"].get("offload_optimizer", {}).get("nvme_path")) is not None:
            mine = Path(folder, "zero_stage_3", "optimizer", f"rank{self.global_rank}")
            shutil.rmtree(mine, ignore_errors=True)
            with suppress(OSError):  # another rank's are still there
                mine.parent.rmdir()
                mine.parents[1].rmdir()
                mine.parents[2].rmdir()


class Zero(Strategy):
    """DeepSpeed's engine accumulates, averages, clips and steps. The optimizer gets flat slices of the weights, and how they are cut."""

    def __init__(self, zero: Tree, clip: float | None, casts: bool, timeout_s: int) -> None:
        """zero: DeepSpeed's `zero_optimization`.  casts: the engine computes in another dtype than float32.  timeout_s: that ranks wait for
        each other."""
        self._casts = casts
        self._frozen: dict[str, Tensor] = {}  # float32 values: the engine has no masters of frozen weights
        config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        config |= {"gradient_clipping": clip or 0.0, "train_micro_batch_size_per_gpu": 1}  # a number for DeepSpeed's logs
        if zero.get("zero_quantized_gradients"):
            config["communication_data_type"] = "fp16"  # its kernels take the bits of a gradient for those of an fp16 number
        self.plugin = _AnyDevice(config=config, logging_level=logging.ERROR, timeout=timedelta(seconds=timeout_s))

    def lightning(self) -> Any:
        return self.plugin

    def shard(self, model: LM, mesh: Any, fill: Fill) -> None:
        """Keeps a copy of the frozen weights, since the engine, which takes the whole model, casts these too."""
        self._frozen = {name: p.detach().clone() for name, p in self._kept(model)}

    def _kept(self, model: LM) -> list[tuple[str, nn.Parameter]]:
        moved = model.self_updated()
        return [(name, p) for name, p in model.named_parameters() if self._casts and not p.requires_grad and name not in moved]

    def divisor(self, accumulation: int, world: int) -> int:
        """Lightning divides by the accumulation, and DeepSpeed divides by it once more."""
        return accumulation**2 * world

    def accumulate(self, n: int) -> None:
        """The engine counts micro-batches from the last change on, and keeps the number in its optimizer too."""
        engine: Any = self.plugin.deepspeed_engine
        engine.set_train_batch_size(n * engine.dp_world_size)  # rows of a micro-batch count as one
        engine.micro_steps, engine.optimizer.gradient_accumulation_steps = 0, n

    def prepare(self, optimizer: Optimizer, judge: Judge) -> None:
        """The engine replaces the parameters by flat slices, which are given their state in `ready`."""
        super().prepare(optimizer, judge)
        optimizer.state.clear()
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        stepped = next(p for group in optimizer.param_groups for p in group["params"])
        optimizer.found_inf = self.judge(self._norm()).to(stepped.device)

    def ready(self, optimizer: Optimizer) -> None:
        engine = self._engine
        begin_state(engine.optimizer)
        world = torch.distributed.get_world_size()
        for group, weights, part in zip(engine.optimizer.param_groups, engine.round_robin_bit16_groups, engine.partition_size, strict=True):
            group[CUTS] = in_a_row([p.shape for p in weights], part, world)

    def clip(self, model: nn.Module, optimizer: Optimizer, limit: float | None) -> None:
        """The engine clips, inside its step."""

    def settle(self) -> None:
        self.judge(self._norm())  # again, for a step that the engine itself has skipped

    @property
    def _engine(self) -> Any:
        """DeepSpeed's optimizer, which wraps ours."""
        engine: Any = self.plugin.deepspeed_engine
        return engine.optimizer

    def _norm(self) -> Tensor:
        return torch.as_tensor(self._engine._global_grad_norm, dtype=torch.float32, device=self.plugin.root_device)

    def weights(self, model: nn.Module) -> Iterator[Piece]:
        """Yields this rank's slices of the engine's float32 masters, and our float32 copies of frozen weights."""
        p: Any  # a parameter with DeepSpeed's notes on it
        for name, p in model.named_parameters():
            if not p.requires_grad:
                yield Piece.whole(name, "weight", self._frozen.get(name, p))
            elif (found := p._hp_mapping) is not None:
                yield _slice(name, "weight", p, found, found.hp_fragment)

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Iterator[Piece]:
        names = {id(p): name for name, p in model.named_parameters()}
        for params, flat in zip(self._engine.bit16_groups, self._engine.single_partition_of_fp32_groups, strict=True):
            for key, tensor in self._engine.optimizer.state[flat].items():
                for p in params:
                    if tensor.shape != flat.shape:
                        yield Piece.whole(names[id(p)], key, tensor)
                    elif (found := p._hp_mapping) is not None:
                        at = found.hp_fragment_address
                        yield _slice(names[id(p)], key, p, found, tensor.narrow(0, at.start, at.numel))

    def refresh(self, model: nn.Module) -> None:
        self._engine.update_lp_params()
        for name, p in model.named_parameters():
            if name in self._frozen:
                p.data.copy_(self._frozen[name])


def _slice(name: str, kind: str, p: nn.Parameter, found: Any, tensor: Tensor) -> Piece:
    """Returns a flat slice of p or of its state as a piece.  found: DeepSpeed's record of which elements of p this rank keeps."""
    at = found.lp_fragment_address
    return Piece(name, kind, tuple(p.shape), (at.start,), tensor, share=ALONE)
