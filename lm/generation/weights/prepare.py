"""Makes a model ready to decode: every matrix is held in the wanted dtype and in the layout that is fastest on this machine, and layers
are fused where they can be."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn

from lm.errors import ConfigError
from lm.generation.config import Dtype
from lm.generation.weights.fused import FusedBlock, FusedGQA, FusedMLP, QuickRMSNorm, QuickRope
from lm.generation.weights.inference_linear import InferenceLinear, OneDNN, Plain, Twice
from lm.generation.weights.quantised import GROUP, Int4, Int4Reference, Int8, Int8Reference
from lm.generation.weights.replayed import Replayed, tell_uncompiled
from lm.nn.block import Block
from lm.nn.ffn.base import Mixture
from lm.nn.ffn.mlp import GatedMLP
from lm.nn.head import Head
from lm.nn.linear import PLAIN
from lm.nn.mixers.base import Attention, Mixer
from lm.nn.mixers.gqa import CrossAttention
from lm.nn.mixers.grouped import GQA
from lm.nn.norm import BareRMSNorm, RMSNorm, ZeroCenteredRMSNorm
from lm.nn.position.rope import Rope
from lm.nn.transformer import LM
from lm.ops.compiling import why_not_compiled
from lm.progress import progress

if TYPE_CHECKING:
    from lm.generation.weights.compiled import Step

KINDS: dict[Dtype, tuple[type[InferenceLinear], ...]] = {
    "saved": (OneDNN, Plain),
    "fp32": (OneDNN, Plain),
    "bf16": (OneDNN, Plain),
    "fp16": (Plain,),
    "int8": (Int8, Int8Reference),
    "int4": (Int4, Int4Reference),
}
"""Ways to hold a matrix, of which the last is the readable reference and fits everywhere."""
_FUSED = ("cpu", "cuda")  # devices for which layers are fused, and steps compiled
_SMALL = 1 << 19  # numbers of a matrix below which oneDNN's calls cost more than its reading saves: two cores of an AMD EPYC, float32
_CLEARLY = 1.5  # times as fast F.linear must be to be preferred: the two round differently, and a machine must always choose the same
_TRIES = 24
_BETWEEN_S = 0.0007  # between tries, so that another process on one of our cores does not disturb all of them


class InferenceHead(Head):
    """A head whose matrix is an `InferenceLinear`."""

    def __init__(self, of: Head, linear: nn.Module) -> None:
        nn.Module.__init__(self)
        self.scale, self.softcap, self.linear = of.scale, of.softcap, linear
        self.dense, self.norm, self.narrow = of.dense, of.norm, of.narrow
        self.in_features, self.out_features = of.in_features, of.out_features
        self.row: Callable[[Tensor], Tensor] | None = None  # the product of one row, (1, 1, d) -> (1, 1, v), compiled
        if of.dense is not None:
            self.act = of.act

    def product(self, x: Tensor) -> Tensor:
        if self.row is not None and x.numel() == self.in_features:
            return self.row(x.view(1, 1, -1)).view(*x.shape[:-1], -1)
        out: Tensor = self.linear(x)
        return out

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}"


@torch.no_grad()
def prepare(model: LM, dtype: Dtype = "saved", compiled: bool = False) -> LM:
    """Returns the model itself, which from now on can decode and be evaluated, but can be neither trained, moved nor saved, nor its layers
    be hooked.

    dtype: of all matrices but the embedding, stacked experts and the expansions of latent attention, which stay as they are saved, like
    norms, activations and cache; fp32 is of all of these.  compiled: compiles the step over one token of one row, for which a CPU holds
    matrices that are not quantised twice; on CUDA, where a step that cannot be compiled is left as it is, records the step over one token
    of each row as a graph. Raises ConfigError for a matrix that cannot be held in this dtype, and on a CPU for a step that cannot be
    compiled.
    """
    device = model.embed.weight.device
    if compiled and device.type not in _FUSED:
        raise ConfigError(f"compile=true is for CPUs and CUDA, and the model is on {device.type}. Leave it out.")
    if compiled and device.type == "cpu":
        from lm.generation.weights.compiled import require_compiler  # and torch's tools for graphs

        require_compiler()
    model.requires_grad_(False)
    if dtype == "fp32":
        model.float()
    _Preparing(model, dtype, compiled).run()
    model.eval()  # not before: fused layers begin in training mode, with dropout
    for module in [*model.modules()][1:]:
        vars(module).update(register_forward_hook=_unhooked, register_forward_pre_hook=_unhooked)
    if compiled:
        model.fast_path = _step(model, device)
    return model


def _unhooked(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises ConfigError, where a hook would wait for calls that never come: layers are fused, and matrices called past their hooks."""
    raise ConfigError("model: its layers are held for decoding, past hooks. Load it without dtype to look inside.")


def _step(model: LM, device: torch.device) -> "Step | Replayed":
    """Returns the step of one row, compiled, or on CUDA that of all rows, recorded. Raises ConfigError on a CPU where it cannot be."""
    if device.type == "cpu":
        return _compiled(model)
    try:
        if (why := why_not_compiled(device)) is not None:
            raise ConfigError(f"compile=true: {why}. Leave it out.")
        return Replayed(model, one=_compiled(model))
    except ConfigError as error:
        tell_uncompiled(error)
        return Replayed(model)


def _compiled(model: LM) -> "Step":
    """Compiles the step over one token of one row, and the head over what it gives."""
    from lm.generation.weights.compiled import Step, row_of

    with progress("compiling a step"):
        step = Step(model)
        if isinstance(head := model.head, InferenceHead):
            head.row = row_of(cast(InferenceLinear, head.linear), model.embed.weight.new_zeros(1, 1, head.in_features))
    return step


class _Preparing:
    """Replaces the layers of a model by fused ones, and their matrices by an `InferenceLinear` each."""

    def __init__(self, model: LM, dtype: Dtype, compiled: bool) -> None:
        """Chooses how matrices are held. Raises ConfigError for one that cannot be held in this dtype."""
        self.model, self.dtype = model, dtype
        linears = {path: each for path, each in model.named_modules() if type(each) in (*PLAIN, Head)}
        if dtype == "int4":
            for path, linear in linears.items():
                if linear.in_features % GROUP:
                    raise ConfigError(
                        f"dtype=int4: {path} has {linear.in_features} inputs, which is no multiple of {GROUP}. Use dtype=int8."
                    )
        largest = max(linears.values(), key=lambda each: (type(each) is not Head, each.weight.numel()))
        self.kinds = ranked(KINDS[dtype], self._cast(largest.weight))
        self.traced_kinds = [Twice if compiled and kind is OneDNN else kind for kind in self.kinds]

    def run(self) -> None:
        """Fuses layers where they can be, then holds the other matrices, and fuses blocks last, which hold fused layers."""
        device = self.model.embed.weight.device.type
        fused = device in _FUSED
        rope = self._rope() if fused else None
        for path, module in self._modules() if fused else ():
            if type(module) is GQA and FusedGQA.fits(module):
                self.model.set_submodule(path, FusedGQA(module, partial(self._held, path), rope))
            elif type(module) is GatedMLP and FusedMLP.fits(module):
                self.model.set_submodule(path, FusedMLP(module, partial(self._held, path)))
            elif type(module) is Rope and rope is not None:
                self.model.set_submodule(path, QuickRope(module))
        for path, module in self._modules():
            if type(module) is Head:
                self.model.set_submodule(path, InferenceHead(module, self._held(path, module.weight, module.bias)))
            elif type(module) in PLAIN:
                self.model.set_submodule(path, self._held(path, module.weight, module.bias))
            elif type(module) in (BareRMSNorm, RMSNorm, ZeroCenteredRMSNorm) and device == "cpu":
                self.model.set_submodule(path, QuickRMSNorm(module.gain(), module.eps))
        for path, module in self._modules() if fused else ():
            if type(module) is Block and FusedBlock.fits(module):
                self.model.set_submodule(path, FusedBlock(module))

    def _modules(self) -> Iterator[tuple[str, Any]]:
        """Yields the modules of the model as it is now. Each is kept no longer: what has been replaced is freed before the next is made."""
        left = [*self.model.named_modules()][::-1]
        while left:
            yield left.pop()

    def _rope(self) -> Rope | None:
        """Returns the model's Rope where all layers that rotate can be fused, and as many dimensions of each head turn; else None. An
        encoder's Rope is like its decoder's."""
        rotated = [each for each in self.model.modules() if isinstance(each, Attention) and not isinstance(each, CrossAttention)]
        rope = self.model.position
        if type(rope) is not Rope or not all(type(each) is GQA and FusedGQA.fits(each) for each in rotated):
            return None
        return rope if rope.local is None or rope.local.shape == rope.rates.shape else None

    def _held(self, path: str, weight: Tensor, bias: Tensor | None) -> InferenceLinear:
        weight = self._cast(weight)
        kinds = self.traced_kinds if self._is_traced(path) else self.kinds
        return next(kind for kind in kinds if kind.fits(weight))(weight, None if bias is None else bias.detach())

    def _is_traced(self, path: str) -> bool:
        """Returns whether the matrix would be inside a compiled piece, and not in a module that a compiled step calls uncompiled."""
        *above, _ = accumulate(path.split("."), "{}.{}".format)
        modules = map(self.model.get_submodule, above)
        return path == "head" or (
            path.startswith("blocks.") and not any(isinstance(each, Mixer | Mixture) and type(each) is not FusedGQA for each in modules)
        )

    def _cast(self, weight: Tensor) -> Tensor:
        return weight.detach().to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.dtype, weight.dtype))


def ranked(kinds: Sequence[type[InferenceLinear]], weight: Tensor) -> list[type[InferenceLinear]]:
    """Returns the ways to hold this matrix, the preferred one first. Only a large matrix that oneDNN can hold is timed, since a seed must
    give the same text tomorrow, which may not depend on a close race."""
    blocked = OneDNN in kinds and OneDNN.fits(weight)
    if blocked and (weight.numel() < _SMALL or _is_clearly_faster(Plain(weight, None), OneDNN(weight, None), weight)):
        return [*reversed(kinds)]
    return [*kinds]


def _is_clearly_faster(one: InferenceLinear, other: InferenceLinear, weight: Tensor) -> bool:
    """Returns whether `one` multiplies a row clearly faster than `other` on this machine."""
    row = torch.ones(1, weight.shape[1], dtype=weight.dtype)
    tries = []
    for _ in range(_TRIES):
        tries.append([_seconds(held, row) for held in (one, other)])
        time.sleep(_BETWEEN_S)
    first, second = map(min, zip(*tries, strict=True))
    return first * _CLEARLY < second


def _seconds(held: InferenceLinear, row: Tensor) -> float:
    begun = time.perf_counter()
    held(row)
    return time.perf_counter() - begun
