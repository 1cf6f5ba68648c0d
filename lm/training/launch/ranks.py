"""The processes of a run, and their collectives for small objects, on the CPU."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from lm.errors import ConfigError, LmError
from lm.ops.defaults import default_kind, why_not_mac
from lm.ops.ranks.ulysses import ShardedRows, Ulysses
from lm.training.launch.config import LaunchConfig

T = TypeVar("T")
_OF_SCHEDULERS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "KUBERNETES_PORT"),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
}


class PeerLost(LmError):
    """Another rank has ended, so this one cannot go on; that rank's own error says why."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run. All methods are collective, and cost nothing where there is one process."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    group: Any = None  # process group of torch.distributed; None: the default one

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Returns the ranks that torchrun has set, else a single process: a scheduler's variables are removed, since Lightning would follow
        them. Raises ConfigError where torchrun's variables are no valid ranks."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            for name in _OF_SCHEDULERS & os.environ.keys():
                del os.environ[name]
            return cls()
        given = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        if not all(value.isdecimal() for value in given.values()) or int(given["RANK"]) >= int(given["WORLD_SIZE"]):
            said = " ".join(f"{name}={value!r}" for name, value in given.items())
            raise ConfigError(
                f"environment: {said}, where torchrun sets three numbers. Start the ranks by torchrun, or unset TORCHELASTIC_RUN_ID."
            )
        return cls(*map(int, given.values()))

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the run's files."""
        return self.rank == 0

    def meet(self, timeout_s: int) -> None:
        """Forms the process group: gloo for tensors on the CPU, NCCL for tensors on GPUs."""
        if "TORCHELASTIC_RUN_ID" in os.environ and not distributed.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))

    def total(self, *values: float) -> list[float]:
        """Returns each value summed over the ranks."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def most(self, *values: float) -> list[float]:
        """Returns the maximum of each value over the ranks."""
        return self._reduced(values, distributed.ReduceOp.MAX)

    def _reduced(self, values: tuple[float, ...], how: Any) -> list[float]:
        if self.world == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(numbers, how, group=self.group)
        return numbers.tolist()

    def apart(self, timeout_s: int) -> "Ranks":
        """Returns the same ranks with a process group of their own, for use in another thread."""
        return self if self.world == 1 else replace(self, group=distributed.new_group(None, timedelta(seconds=timeout_s), "gloo"))

    def barrier(self) -> None:
        self.total(0.0)

    def from_first(self, find: Callable[[], T]) -> T:
        """Returns rank 0's result of `find` on every rank; the others wait for it."""
        if self.world == 1:
            return find()
        box: list[Any] = [find() if self.first else None]
        distributed.broadcast_object_list(box, 0, group=self.group, device=torch.device("cpu"))
        return box[0]

    def each(self, value: T) -> list[T]:
        """Returns every rank's value, on every rank."""
        found = [value] * self.world
        if self.world > 1:
            distributed.all_gather_object(found, value, group=self.group)
        return found

    def first_here(self, find: Callable[[], T]) -> T:
        """Runs `find` on the first rank of each machine, and then on the machine's others, which find its work done (in a cache, say)."""
        if self.local_rank == 0:
            found = find()
            self.barrier()
            return found
        self.barrier()
        return find()


@dataclass(frozen=True)
class GroupedRanks:
    """The ranks of a shared evaluation in groups of n; all ranks of a group do the same work and count as one."""

    ranks: Ranks
    n: int

    @property
    def rank(self) -> int:
        return self.ranks.rank // self.n

    @property
    def world(self) -> int:
        return self.ranks.world // self.n

    def total(self, *values: float) -> list[float]:
        return [value / self.n for value in self.ranks.total(*values)]


def row_sharding_of(launch: LaunchConfig) -> ShardedRows | None:
    """Returns how this rank and its neighbours share rows; None where it has whole rows. All ranks must call it.

    Neighbouring ranks share rows, so that their exchange stays on one machine where possible.
    """
    n = launch.context
    if n == 1:
        return None
    rank, timeout = distributed.get_rank(), timedelta(seconds=launch.timeout_s)
    groups = [distributed.new_group([*range(first, first + n)], timeout) for first in range(0, launch.world, n)]
    return Ulysses(groups[rank // n], rank % n, n)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is one that gloo or NCCL raises when another rank's process is gone."""
    words = ("onnection closed", "onnection reset", "onnection refused", "Broken pipe", "remote process exited", "Socket")
    return isinstance(error, RuntimeError) and (has_timed_out(error) or any(word in str(error) for word in words))


def has_timed_out(error: BaseException) -> bool:
    """Whether an error is one that gloo or NCCL raises where another rank has not answered. Of several exchanges that wait for it gloo
    tells only one that it has timed out, and the others of the timeout that closed their pair."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("imed out", "timeout caused pair closure"))


def device_kind(device: str, devices: int) -> str:
    """Returns the kind of device that training is to run on, cpu, cuda or mps; ConfigError where it cannot.  device: of these, or auto.
    devices: how many."""
    kind = default_kind() if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch finds no GPU here. Use trainer.device=auto or cpu.")
    if kind == "mps" and (reason := why_not_mac()) is not None:
        raise ConfigError(f"trainer.device=mps, but {reason}. Use trainer.device=auto or cpu.")
    if kind == "cuda" and (found := torch.cuda.device_count()) < devices:
        raise ConfigError(f"launch.devices={devices}, but torch finds {found} GPUs here. Use as many, or fewer.")
    return kind
