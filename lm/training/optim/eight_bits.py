"""AdamW whose moments of the blocks' matrices are in 8 bits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lm.training.optim.base import Group, Skippable, State, adam_state, adamw_step
from lm.training.optim.codes import BLOCK, Coded, blocks, encoded

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class EightBitAdamW(Skippable):
    """Groups that are `coded` have their moments in blocks of 256 codes with a scale each.  Dettmers et al. 2021, arXiv:2110.02861.

    A step decodes some blocks at a time, steps in float32 with the kernel of all others, and encodes again. What it has left as it was
    has the same codes again (`Coded`), and so has a checkpoint, which is in float32.
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
    """Returns a moment in as many parts as `_flat(p).split(_at_a_time(p))` has."""
    codes, scales = (state[f"{name}_{part}"].split(_at_a_time(p) // BLOCK) for part in ("codes", "scales"))
    return [Coded(*pair, _SIGNED[name]) for pair in zip(codes, scales, strict=True)]


def _at_a_time(p: Tensor) -> int:
    """Elements: what the cache of a core holds; elsewhere, what takes longer than to launch the kernels."""
    return 1 << 18 if p.device.type == "cpu" else 1 << 24


def _flat(x: Tensor) -> Tensor:
    """What this rank has of it, to be written to."""
    from torch.distributed.tensor import DTensor  # here: a config is known without it

    return (x.to_local() if isinstance(x, DTensor) else x).view(-1)
