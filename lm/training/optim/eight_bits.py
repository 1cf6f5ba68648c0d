"""AdamW with 8-bit moments for the blocks' matrices."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lm.training.optim.base import Group, Skippable, State, adam_state, adamw_step
from lm.training.optim.codes import BLOCK, Coded, blocks, encoded

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class EightBitAdamW(Skippable):
    """Moments of `coded` groups are kept in blocks of 256 codes with a scale each.  Dettmers et al. 2021, arXiv:2110.02861.

    A step decodes some blocks at a time, steps in float32 with the same kernel as uncoded groups, and encodes again. Values that a step
    leaves unchanged get the same codes again (see `Coded`), and so do values that went through a checkpoint in float32.
    """

    def initial_state(self, group: Group, p: Tensor) -> State:
        if not group["coded"]:
            return adam_state(p)
        empty = blocks(torch.zeros_like(_flat(p), dtype=torch.float32))
        coded = {name: encoded(empty, signed) for name, signed in _SIGNED.items()}
        return {"step": torch.zeros((), dtype=torch.float32, device=p.device)} | {
            f"{name}_{part}": x for name, of in coded.items() for part, x in (("codes", of.codes), ("scales", of.scales))
        }

    @contextmanager
    def lent(self, group: Group, p: Tensor) -> Iterator[State]:
        state = self.state[p]
        if not group["coded"]:
            yield state
            return
        found = {name: torch.zeros_like(p, dtype=torch.float32) for name in _SIGNED}  # sharded as the weight is
        each = [pair for name, x in found.items() for pair in zip(_flat(x).split(_at_a_time(p)), _parts(p, state, name), strict=True)]
        for x, coded in each:
            x.copy_(coded.decode().view(-1)[: len(x)])
        yield {"step": state["step"], **found}
        for x, coded in each:
            coded.encode_(blocks(x))

    def _step(self, params: list[Tensor], group: Group) -> None:
        if not group["coded"]:
            adamw_step(params, [self.state[p] for p in params], group, self.found_inf)
            return
        for p in params:
            self._step_by_parts(p, group)

    def _step_by_parts(self, p: Tensor, group: Group) -> None:
        assert p.grad is not None
        state = self.state[p]
        counted = state["step"]
        slices = (_flat(x).split(_at_a_time(p)) for x in (p, p.grad.contiguous()))
        for weight, grad, *coded in zip(*slices, *(_parts(p, state, name) for name in _SIGNED), strict=True):
            counted, moments = state["step"].clone(), [of.decode() for of in coded]
            plain = {name: x.view(-1)[: len(weight)] for name, x in zip(_SIGNED, moments, strict=True)}
            wide = weight.float()
            wide.grad = grad.float()
            adamw_step([wide], [{"step": counted, **plain}], group, self.found_inf)
            weight.copy_(wide)
            for of, x in zip(coded, moments, strict=True):
                of.encode_(x)
        state["step"].copy_(counted)


def _parts(p: Tensor, state: State, name: str) -> list[Coded]:
    """Returns the encoded moment `name` in parts that match `_flat(p).split(_at_a_time(p))`."""
    codes, scales = (state[f"{name}_{part}"].split(_at_a_time(p) // BLOCK) for part in ("codes", "scales"))
    return [Coded(*pair, _SIGNED[name]) for pair in zip(codes, scales, strict=True)]


def _at_a_time(p: Tensor) -> int:
    """Returns how many elements to step at a time. On a CPU they fit a core's cache; on a GPU they take longer than launching kernels."""
    return 1 << 18 if p.device.type == "cpu" else 1 << 24


def _flat(x: Tensor) -> Tensor:
    """Returns this rank's part of a tensor as a flat view that can be written to."""
    from torch.distributed.tensor import DTensor  # here: a config is known without it

    return (x.to_local() if isinstance(x, DTensor) else x).view(-1)
