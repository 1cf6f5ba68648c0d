"""The decoding step over one token of each row as one launch: a CUDA graph, recorded once for a cache whose tensors and shapes stay."""

import copy
from collections.abc import Callable
from typing import NoReturn, cast

import torch
from torch import Tensor

from lm.errors import ConfigError
from lm.nn.context import Context
from lm.nn.transformer import LM
from lm.ops.attention.mask import Mask
from lm.ops.cache.cache import Cache
from lm.ops.cache.ring import FirstSlots, Slots
from lm.printing import note

_LEAST = 256  # slots that a step attends to at least, where the cache has as many

Run = Callable[[], Tensor]
Quick = Callable[[Tensor, Context], Tensor | None]
"""The blocks and the last norm over one token of each row; None where it does not serve."""
Record = Callable[[Run], Run]
"""Turns a function whose tensors stay where they are into one that repeats its work without Python."""


def by_cuda(run: Run) -> Run:
    """Records what `run` launches as a CUDA graph; returns a function that replays it. Calls `run` once before, so that kernels are loaded
    and libraries have their workspaces. Raises ConfigError where it cannot be recorded."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads of a server may allocate meanwhile
            out = run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = f"compile=true: a layer cannot be recorded ({str(error).strip().splitlines()[0]})"
        raise ConfigError(f"{said}. Leave it out.") from error

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


class Replayed:
    """The blocks and the last norm over one token of each row, recorded at the second such step of a cache, and again when more slots are
    attended to or rows have come or gone. Empty slots are read too, and hidden by the mask: results are those of the unrecorded step up to
    rounding."""

    def __init__(self, model: LM, record: Record = by_cuda, one: Quick | None = None) -> None:
        """one: what computes the step of one row in fewer operations than the model does. None: nothing does."""
        self._model, self._record, self.one = model, record, one

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        """(b, 1, d) -> (b, 1, d); None for any other input, which the model computes without this step."""
        cache = ctx.cache
        if cache is None or x.shape[1] != 1 or ctx.mask.padded or not all(slots.in_place for slots in cache.groups.values()):
            return None
        wanted = tuple(map(_seen, cache.groups.values()))
        found, step = cache.recorded or (None, None)
        if found != wanted:
            cache.recorded = wanted, None
            return None
        if step is None:
            cache.recorded = wanted, (step := self._recorded(x, ctx))
        return cast(_Step, step)(x, ctx)

    def _recorded(self, x: Tensor, ctx: Context) -> "_Step":
        """Records a step; as the model computes it, where `one`, which may only now meet its device's compiler, cannot be recorded."""
        try:
            return _Step(self._model, x, ctx, self._record, self.one)
        except ConfigError as error:
            if self.one is None or len(x) > 1:
                raise
            self.one = None
            tell_uncompiled(error)
        return _Step(self._model, x, ctx, self._record, None)


def tell_uncompiled(error: ConfigError) -> None:
    """Says on stderr why a step is not compiled before it is recorded."""
    note(f"{str(error).partition('. ')[0]}: a step is recorded as it is.")


def _seen(slots: Slots) -> int:
    """Returns how many slots a step attends to: a power of two, so that few graphs are recorded while a row grows; or all."""
    filled = min(max(slots.written), slots.n)
    return min(slots.n, max(_LEAST, 1 << (filled - 1).bit_length()))


class _Step:
    """One recorded step. It always works on the same tensors: inputs are copied into them before, and results out of them behind."""

    def __init__(self, model: LM, x: Tensor, ctx: Context, record: Record, one: Quick | None) -> None:
        assert ctx.cache is not None
        assert ctx.tokens is not None
        self.x, self.at, self.cache = x.clone(), ctx.mask.q_positions.expand(len(x), 1).clone(), _Still(ctx.cache)
        self.tokens = ctx.tokens.clone()
        memory = None if ctx.memory_mask is None else ctx.memory_mask.k_positions

        def run() -> Tensor:
            self.cache.look(self.at)
            mask = Mask(self.at, self.at, causal=model.causal, padded=False)
            across = None if memory is None else Mask(self.at, memory, causal=False)
            here = Context(model.position, mask, model.position.angles(self.at), self.cache, memory_mask=across, tokens=self.tokens)
            out = None if one is None else one(self.x, here)
            return model.norm(model.through_blocks(self.x, here)) if out is None else out

        self.replay = record(run)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor:
        assert ctx.cache is not None
        assert ctx.tokens is not None
        self.x.copy_(x)
        self.tokens.copy_(ctx.tokens)
        self.at.copy_(ctx.mask.q_positions)
        self.cache.take(ctx.cache)
        out = self.replay().clone()
        self.cache.give(ctx.cache)
        return out


class _Still(Cache):
    """A cache as a recorded step uses it; it shares the tensors of `of`. The slot to write to is given by a tensor, empty slots are
    attended to but masked, and states of fixed size are copied to where they were at recording."""

    def __init__(self, of: Cache) -> None:
        self.device, self.form, self.slack, self.horizon = of.device, of.form, of.slack, of.horizon
        self.group_of, self.stores = of.group_of, of.stores
        self.memory, self.memory_positions = of.memory, of.memory_positions
        self.groups = {key: _still(slots) for key, slots in of.groups.items()}
        self.held = {layer: [x.clone() for x in of.state(layer)] for layer in of.states}
        self.after: dict[int, tuple[Tensor, ...]] = {}
        self.take(of)

    @property
    def length(self) -> NoReturn:
        raise ConfigError("compile=true: a layer reads the length of the cache, of which a recorded step knows nothing. Leave it out.")

    def take(self, of: Cache) -> None:
        """Takes from the real cache, before a step, the slots to write to and the states."""
        for key, slots in of.groups.items():
            index = self.groups[key].index
            assert isinstance(index, Tensor)
            if isinstance(slots.index, slice):
                index.fill_(slots.index.start)
            else:
                index.copy_(slots.index)
        if self.held:
            torch._foreach_copy_([x for held in self.held.values() for x in held], [x for i in self.held for x in of.state(i)])

    def give(self, to: Cache) -> None:
        """Gives the real cache the new states, after a step."""
        for layer, tensors in self.after.items():
            to.advance(layer, *(x.clone() for x in tensors))

    def look(self, positions: Tensor) -> None:
        """A part of the recorded step: sets which slots tokens at these positions, (b, 1), see."""
        for slots in self.groups.values():
            if isinstance(slots, FirstSlots):
                slots.keep(positions)
                slots.look()

    def state(self, layer: int) -> list[Tensor]:
        return self.held[layer + self.before]

    def advance(self, layer: int, *after: Tensor) -> None:
        self.after[layer + self.before] = after


def _still(slots: Slots) -> Slots:
    still = copy.copy(slots)
    still.index = torch.zeros(len(slots.positions), 1, dtype=torch.int64, device=slots.positions.device)
    still.visible = slots.positions[:, : _seen(slots)]
    return still
