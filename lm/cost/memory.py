"""The memory of training on one rank, by formula. It counts the tensors that stay; allocator and kernels need some more."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from math import prod
from typing import NamedTuple

from torch import nn

from lm.nn.activation_memory import Activations, Precision, sum_activations
from lm.nn.head import WIDE_CPU
from lm.nn.linear import Out
from lm.nn.model_config import ModelConfig
from lm.nn.parts import ATTENDING, BlockParts
from lm.nn.transformer import LM
from lm.ops.ranks.tensor_parallel import Divisible
from lm.ops.recompute import NOTHING, Recompute

StateBytes = Callable[[Sequence[int], bool, int], float]
"""Bytes that an optimizer keeps of a weight: by its shape, whether it is one of the blocks' matrices, and the bytes of its elements."""


def two_numbers(shape: Sequence[int], matrix: bool, number: int) -> float:
    """Returns the bytes that AdamW keeps of a weight."""
    return 2 * number * prod(shape)


@dataclass(frozen=True)
class Setting:
    """How a model is trained, as far as memory depends on it."""

    micro_batch: int
    seq_len: int  # an encoder-decoder's source has as many tokens
    chunk: int  # tokens whose logits exist at once
    precision: Precision = "fp32"
    states: StateBytes = two_numbers
    copies: int = 0  # of what is trained, beside it: the first in float32, others as the weights are
    recompute: Recompute = NOTHING
    stage: int = 0  # what is cut into slices: 1 optimizer states, 2 gradients too, 3 weights too (ZeRO; FSDP2 is 3)
    world: int = 1  # ranks that share the slices
    context: int = 1  # ranks that share the tokens of a row
    tensor: int = 1  # of these ranks, those that share the matrices: 1 or all
    device: str = "cuda"  # training runs on: cpu, cuda or mps
    compiled: bool = False  # blocks are, and compute more again than autograd does


@dataclass(frozen=True)
class Memory:
    """Bytes on each rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # what autograd saves of a micro-batch
    loss: int  # logits of one chunk, over which their gradient is written, those in float32, the head's gradient while it is summed, and
    # what each loss keeps of it
    averages: int = 0  # of the weights, with what they are made of
    frozen: int = 0  # weights of the models that the loss compares with, and what a teacher says of a chunk

    @property
    def total(self) -> int:
        """At the end of the forward: from the second micro-batch on, all of it is there at once."""
        return sum(astuple(self))

    def parts(self) -> dict[str, int]:
        """Returns each by its name; `averages` and `frozen` only where there are such."""
        return {name: size for name, size in asdict(self).items() if size or name not in ("averages", "frozen")}

    def on_device(self, offload: bool) -> int:
        """Returns what of the total is on the device.  offload: the optimizer's state is elsewhere."""
        return self.total - (self.optimizer if offload else 0)


def memory(model: LM, setting: Setting) -> Memory:
    """Returns what training takes on each rank. The model may be on the meta device. DDP's buckets come on top.

    Frozen weights have no gradient and no optimizer state; `self_updated` parameters stay in float32.
    """
    cut, n = [setting.world if setting.stage >= stage else 1 for stage in (3, 2, 1)], setting.tensor
    size = 2 if setting.precision == "bf16-true" else 4
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    self_updated = sum(p.numel() for p in model.self_updated().values())
    held = sum(p.numel() * min(size, p.element_size()) for p in model.parameters()) + self_updated * (4 - size)
    matrices = model.matrices()
    states = round(sum(setting.states(p.shape, name in matrices, size) for name, p in model.named_parameters() if p.requires_grad))
    copied = sum([4, *[size] * (setting.copies - 1)][: setting.copies]) * trained + 4 * self_updated * (setting.copies == 1)
    whole = gathered(model, n) * size if cut[0] > 1 else 0
    cast = 2 * multiplied(model) if setting.precision.endswith("-mixed") else 0
    tokens = setting.micro_batch * setting.seq_len // setting.context
    logits = min(setting.chunk, tokens * n) * -(-model.cfg.head.size(model.vocab_size) // n)
    return Memory(
        weights=-(-(held + cast) // cut[0]) + whole,
        gradients=-(-trained * size // cut[1]),
        optimizer=-(-states // cut[2]),
        averages=-(-copied // cut[0]),
        activations=tokens * _activations(model, setting),
        loss=_of_logits(logits, setting)
        + sum(_part(model.head, name, p, n) for name, p in model.head.named_parameters() if p.requires_grad)
        * (4 + size * (1 + len(model.mtp) * model.runs_mtp)),
    )


def _of_logits(logits: int, setting: Setting) -> int:
    """Returns the bytes of a chunk's logits, of their copies in float32, and of float32 gradients that are not written over these
    copies. On a GPU a compiled function needs neither (where Triton is missing, it is some MiB more)."""
    narrow = setting.precision != "fp32"
    if setting.tensor > 1:
        return logits * (8 + (2 if narrow else 0))
    return logits * (2 if narrow else 4) + (min(logits, WIDE_CPU) * 4 * narrow if setting.device == "cpu" else 0)


def gathered(model: LM, tensor: int = 1) -> int:
    """Returns how many parameters a rank holds gathered at a time: those of the block at work, and those outside of blocks."""
    blocks = [sum(p.numel() for p in unit.parameters()) for unit in model.units()]
    rest = sum(p.numel() for p in model.parameters()) - sum(blocks)
    table = {p for module in (model.embed, model.head) for name, p in module.named_parameters() if name in module.cut}
    cut = sum(p.numel() for p in table)
    return rest - cut + -(-cut // tensor) + max(blocks) // tensor


def _part(module: Divisible, name: str, p: nn.Parameter, tensor: int) -> int:
    """Returns how many numbers of this weight one of `tensor` ranks has."""
    return -(-p.numel() // tensor) if name in module.cut else p.numel()


def multiplied(model: LM) -> int:
    """Returns how many weights are in matrices that autocast keeps a bf16 copy of until the backward: not those held in fewer bits."""
    roles = model.roles()
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m.weight.element_size() == 4)
    return linear + sum(p.numel() for name, p in model.named_parameters() if p.ndim == 3 and roles[name] == "hidden")


class _Unit(NamedTuple):
    """What autograd saves of one token in a block."""

    layer: int
    whole: Activations
    inputs: Activations
    products: Activations  # outputs of matrix products and fused kernels
    unread: Activations  # of these, the ones that the backward does not read


def _activations(model: LM, setting: Setting) -> int:
    """Returns the bytes of activations for one token."""
    cfg, d = model.cfg, model.cfg.d_model
    saved, again = [_ends(d), *[cfg.embed.saved_activations(d)] * len(model.stacks())], 0
    saved += [cfg.residual.saved_between_blocks(d, len(stack.blocks)) for stack in model.stacks()]
    for unit in _units(model, setting):
        what = setting.recompute.of(unit.layer)
        left = {"none": unit.whole, "block": unit.inputs, "selective": sum_activations([unit.inputs, unit.products])}[what]
        unread = unit.unread if what == "selective" else Activations(0, 0)
        whole, had, unread_bytes = (part.bytes(setting.precision, setting.compiled) for part in (unit.whole, left, unread))
        saved, again = [*saved, left], max(again, whole - had + unread_bytes)
    return sum_activations(saved).bytes(setting.precision, setting.compiled) + again


def _units(model: LM, setting: Setting) -> Iterator[_Unit]:
    cfg, d = model.cfg, model.cfg.d_model
    for stack in model.stacks():
        for block, parts in [*zip(stack.blocks, stack.parts, strict=True)] * cfg.residual.passes():
            inputs = Activations(cfg.residual.width(d), 0)
            yield _Unit(parts.layer, _block(cfg, parts, setting), inputs, *_products(block, parts, setting))
    for layer, block in enumerate(model.mtp if model.runs_mtp else (), cfg.n_layers):
        join = Activations(d, 2 * d)  # the norm of the embedding, and the matrix that reads it beside the hidden states
        parts, inputs = cfg.parts(layer), sum_activations([Activations(d, 0), _ends(d)])
        whole = sum_activations([join, _block(cfg, parts, setting), _ends(d)])
        yield _Unit(layer, whole, inputs, *_products(block, parts, setting))


def _products(module: nn.Module, parts: BlockParts, setting: Setting) -> tuple[Activations, Activations]:
    """Returns the outputs of all products, and of those that are only added to the residual stream; where matrices are in slices, the
    latter are partial sums for the tokens of all ranks."""
    out = sum(m.out_features for m in module.modules() if isinstance(m, Out)) * setting.tensor
    others = [m for m in module.modules() if isinstance(m, nn.Linear) and not isinstance(m, Out)]
    rows = sum(p.shape[0] for m in others for p in m.parameters(recurse=False) if p.ndim == 2)  # those of an adapter too
    return sum_activations([Activations(0, rows + out), parts.kernel_outputs()]), Activations(0, out)


def _ends(d: int) -> Activations:
    """Counts the norm before the head, the hidden states, and the loss's gradient of these."""
    return Activations(d, 2 * d)


def _block(cfg: ModelConfig, parts: BlockParts, setting: Setting) -> Activations:
    """Counts what autograd saves of one token in a block, norms and residual branches included."""
    bias = [cfg.position.saved_activations(cfg.attention.n_heads, setting.seq_len)] if parts.slot in ATTENDING else []
    scores = [mixer.saved_scores(setting.seq_len, setting.device) for mixer in parts.mixers]
    return sum_activations([cfg.block.saved_activations(parts), parts.saved_activations(), *bias, *scores, _exchanged(cfg, parts, setting)])


def _exchanged(cfg: ModelConfig, parts: BlockParts, setting: Setting) -> Activations:
    """Counts what autograd saves of one token in addition, where ranks hold rows in slices; where they hold matrices in slices too, both
    sublayers keep the gathered tokens of all ranks."""
    if setting.tensor > 1:
        of_ffn = parts.ffn.exchanged_activations(cfg.d_model, parts.layer, setting.tensor)
        return sum_activations([Activations(0, (setting.tensor - 1) * cfg.d_model * parts.mixer.sublayers), of_ffn])
    return parts.mixer.exchanged_activations(cfg.d_model, setting.context) if setting.context > 1 else Activations(0, 0)
