"""What every optimizer shares: its slot, parameter groups that carry their weights' names, and state that exists before the first step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lm.errors import ConfigError
from lm.nn.transformer import LM
from lm.schema import Slot
from lm.training.optim.traits import GroupConfig, Traits, traits_of

NamedWeights = list[tuple[str, nn.Parameter]]
Group = dict[str, Any]
State = dict[str, Tensor]
CUTS, RANKS = "cuts", "ranks"
"""Keys of a group whose weights do not tell how ranks hold slices of them: the cuts, by parameter, and the process group of those ranks.
Where the group's only parameter is all slices in a row, the cuts are a list in their order, and the ranks are all."""


class OptimConfig(Slot, group="optim"):
    """The optimizer and its rates."""

    whole_matrices: ClassVar[bool] = False
    """Whether a step needs all of a matrix at once."""
    obeys_rates: ClassVar[bool] = False
    """Whether `build` obeys the rates of each weight, without which no parametrization but the standard one means anything."""
    shapes_state: ClassVar[tuple[str, ...]] = ()
    """Options, besides the kind, that say what the numbers of a state mean: with others they are no state to go on with."""

    lr: float = Field(gt=0)
    """Peak learning rate."""
    clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm. null: no clipping."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Factor on the rate for each block further below the head, and once more for the embedding."""
    groups: list[GroupConfig] = []
    """Weights with a rate or decay of their own; of several that mean a weight, the first counts."""

    @property
    def gathers(self) -> bool:
        """Whether the optimizer itself gathers whole matrices from the ranks' slices, given how they are cut."""
        return False

    @property
    def whole_by(self) -> str:
        """The option that needs whole matrices, as key=value."""
        return f"optim={self.kind}"

    @property
    def coded_by(self) -> str | None:
        """The option that stores the optimizer's state as 8-bit codes, which only this optimizer can read; None where nothing does."""
        return None

    @property
    def of_matrices(self) -> str | None:
        """The option that is for the blocks' matrices alone, all else being AdamW's; None where there is none."""
        return None

    def traits(self, model: LM) -> dict[str, Traits]:
        """Returns the traits of all weights by name, of which some may be frozen; call it while they are whole.

        Raises ConfigError as `traits_of`, and for an option that is for the blocks' matrices where none of these is trained: it would do
        nothing.
        """
        found = traits_of(model, self.groups, self.layer_decay)
        if self.of_matrices is not None and not any(found[name].matrix for name, p in model.named_parameters() if p.requires_grad):
            what = "is for the blocks' matrices, and none of them is trained (those of an adapter are not among them)"
            raise ConfigError(f"{self.of_matrices} {what}. Use plain optim=adamw.")
        return found

    @abstractmethod
    def build(self, named: NamedWeights, traits: Mapping[str, Traits]) -> Optimizer:
        """Returns one optimizer over these parameters; `grouped` makes each of its groups.  traits: by name of the weight."""

    @abstractmethod
    def state_bytes(self, shape: Sequence[int], matrix: bool, number: int) -> float:
        """Returns the bytes of a weight's state.  matrix: it is one of the blocks' matrices; number: bytes of an element of the weight."""


class Stateful(ABC):
    """What an optimizer must provide so that its state can be saved and loaded."""

    @abstractmethod
    def initial_state(self, group: Group, p: Tensor) -> State:
        """Returns the state of one parameter, or of a flat slice of several, before the first step."""

    @contextmanager
    def lent(self, group: Group, p: Tensor) -> Iterator[State]:
        """Yields a parameter's state as checkpoints store it, in the parameter's shape; what is written to it in the block becomes the
        state."""
        assert isinstance(self, Optimizer)
        yield self.state[p]


class Skippable(Optimizer, Stateful):
    """A step with `found_inf` = 1 leaves weights and state bitwise as they were, without waiting for the device."""

    found_inf: Tensor | None = None

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._flag_is_here() and self.found_inf:
            return loss
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step(params, group)
        return loss

    @abstractmethod
    def _step(self, params: list[Tensor], group: Group) -> None:
        """Updates parameters that have gradients once."""

    def _flag_is_here(self) -> bool:
        """Whether `found_inf` is on the CPU, where reading it costs nothing; elsewhere it would wait for the device."""
        return self.found_inf is None or self.found_inf.device.type == "cpu"

    def _write(self, old: list[Tensor], new: list[Tensor] | tuple[Tensor, ...]) -> None:
        """Copies new values over old ones, unless the step is skipped."""
        if not self._flag_is_here():
            assert self.found_inf is not None
            skipped = self.found_inf.bool()
            new = [torch.where(skipped, before, after.to(before.dtype)) for before, after in zip(old, new, strict=True)]
        for before, after in zip(old, new, strict=True):  # not _foreach_copy_, which sharded tensors lack
            before.copy_(after)


def grouped(named: NamedWeights, lr: float, weight_decay: float) -> Group:
    """Returns a parameter group with the weights' `names`, and the `peak_lr` that the schedule's factor multiplies."""
    params, names = [p for _, p in named], [name for name, _ in named]
    return {"params": params, "names": names, "lr": lr, "peak_lr": lr, "weight_decay": weight_decay}


def alike(named: NamedWeights, traits: Mapping[str, Traits]) -> list[tuple[Traits, NamedWeights]]:
    """Returns the weights partitioned by equal traits. Parts with weight decay come first; within both kinds the plain rate comes last."""
    parts: dict[Traits, NamedWeights] = {}
    for pair in named:
        parts.setdefault(traits[pair[0]]._replace(matrix=False, table=False), []).append(pair)
    return sorted(parts.items(), key=lambda part: (not part[0].decays, part[0].rates.adam == 1, part[0].rates.muon == 1, part[0].plain))


def decaying(named: NamedWeights, lr: float, weight_decay: float, traits: Mapping[str, Traits]) -> list[Group]:
    """Returns parameter groups for an optimizer with AdamW's rates: matrices and embeddings, which decay, and vectors, which do not.

    Each group has `rates`. Decay is multiplied by the rate, so a group whose factor lowers its rate has a larger weight_decay.
    """
    return [
        grouped(part, of.peak(lr, of.rates.adam), of.decay(weight_decay, of.rates.adam)) | {"rates": of.rates}
        for of, part in alike(named, traits)
    ]


def adam_state(p: Tensor) -> State:
    """Returns AdamW's initial state of a parameter, as its fused kernel takes it."""
    zero = torch.zeros((), dtype=torch.float32, device=p.device)
    return {"step": zero, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def adamw_step(params: list[Tensor], states: Sequence[State], group: Group, found_inf: Tensor | None) -> None:
    """Makes one AdamW step with the group's options. With `found_inf` = 1 nothing changes; nothing waits for the device."""
    grads = [p.grad for p in params if p.grad is not None]
    means, squares, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
    options: Group = {key: group[key] for key in ("lr", "weight_decay", "eps", "beta1", "beta2")}
    options |= {"fused": True, "amsgrad": False, "maximize": False, "found_inf": found_inf}
    adamw(params, grads, means, squares, [], steps, **options)


def momentum_state(p: Tensor) -> State:
    """Returns a zero momentum, in float32 whatever the weight's dtype."""
    return {"momentum": torch.zeros_like(p, dtype=torch.float32)}


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Sets each group's rate to `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


@torch.no_grad()
def begin_state(optimizer: Optimizer) -> None:
    """Creates all state before the first step, so that it can be saved and loaded at any step."""
    if not isinstance(optimizer, Stateful):  # a plugin's
        what = f"build returned {type(optimizer).__name__}, whose state is not there before a step"
        example = "examples/plugins/adam_atan2.py"
        raise ConfigError(f"optim: {what}. Return an optimizer that derives from lm.kinds.Skippable, as {example} does.")
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = optimizer.initial_state(group, p)


@torch.no_grad()
def named_state(optimizer: Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (parameter's name, kind, tensor) of all state. To load a state, write into the tensor before taking the next one."""
    assert isinstance(optimizer, Stateful)
    for group in optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            with optimizer.lent(group, p) as state:
                for key, tensor in state.items():
                    yield name, key, tensor
