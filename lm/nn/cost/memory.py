"""What training holds in memory on one rank, by formula. Counted are the tensors that stay; allocator and kernels need some more."""

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple

from torch import nn

from lm.nn.block import ParallelConfig
from lm.nn.ffn.experts import Experts
from lm.nn.ffn.mlp import Activation, MLPConfig
from lm.nn.ffn.moe import MoEConfig
from lm.nn.mixers.mla import MLAConfig
from lm.nn.position.bias import T5RelativeConfig
from lm.nn.transformer import LM, AnyModelConfig, DecoderLM

Precision = Literal["fp32", "bf16-mixed", "bf16-true"]


@dataclass(frozen=True)
class Setting:
    """How a model is trained, as far as memory depends on it."""

    micro_batch: int
    seq_len: int  # an encoder-decoder's source has as many tokens
    chunk: int  # tokens whose logits exist at once
    precision: Precision = "fp32"
    states: tuple[int, int] = (8, 8)  # bytes that the optimizer keeps per element of the blocks' matrices, and of all else
    checkpoint_every: int = 0  # as LM.checkpoint_blocks
    stage: int = 0  # what is cut into slices: 1 optimizer states, 2 gradients too, 3 weights too (ZeRO; FSDP2 is 3)
    world: int = 1  # ranks that share the slices


@dataclass(frozen=True)
class Memory:
    """Bytes on each rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # what autograd keeps of a micro-batch
    loss: int  # logits of one chunk with their gradients, the head's gradient while it is summed, and what each loss keeps of it

    @property
    def total(self) -> int:
        """At the end of the forward, where all of it is there from the second micro-batch on."""
        return sum(astuple(self))


class Kept(NamedTuple):
    """Numbers kept for the backward: inputs of norms, which autocast leaves in float32; others; dropout masks of one byte; and
    further copies that autocast makes of an input that several matrices read."""

    wide: int
    narrow: int
    masks: int = 0
    casts: int = 0

    def bytes(self, precision: Precision) -> int:
        """In this precision."""
        narrow = 4 if precision == "fp32" else 2
        casts = 2 * self.casts if precision == "bf16-mixed" else 0
        return self.wide * (2 if precision == "bf16-true" else 4) + self.narrow * narrow + self.masks + casts


def memory(model: LM, setting: Setting) -> Memory:
    """The model may lie on the meta device. Attention counts as fused kernels do it; under DDP, its buckets come on top."""
    cut = [setting.world if setting.stage >= stage else 1 for stage in (3, 2, 1)]
    size = 2 if setting.precision == "bf16-true" else 4
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    held = trained * size + 4 * sum(p.numel() for p in parameters if not p.requires_grad)  # correction biases stay in float32
    matrices = model.matrices()
    inner = sum(p.numel() for name, p in model.named_parameters() if name in matrices and p.requires_grad)
    states = inner * setting.states[0] + (trained - inner) * setting.states[1]
    whole = _gathered(model) * size if cut[0] > 1 else 0
    cast = 2 * _multiplied(model) if setting.precision == "bf16-mixed" else 0
    tokens = setting.micro_batch * setting.seq_len
    return Memory(
        weights=-(-(held + cast) // cut[0]) + whole,
        gradients=-(-trained * size // cut[1]),
        optimizer=-(-states // cut[2]),
        activations=tokens * _activations(model, setting),
        loss=min(setting.chunk, tokens) * model.vocab_size * (12 if setting.precision == "fp32" else 16)
        + sum(p.numel() for p in model.head.parameters() if p.requires_grad) * (4 + size * (1 + _depth(model))),
    )


def _gathered(model: LM) -> int:
    """Parameters that a rank sees whole: of the block at work, and those outside of blocks."""
    blocks = [sum(p.numel() for p in unit.parameters()) for unit in model.units()]
    return sum(p.numel() for p in model.parameters()) - sum(blocks) + max(blocks)


def _multiplied(model: LM) -> int:
    """Weights of matrices: what autocast keeps a bf16 copy of until the backward."""
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    return linear + sum(p.numel() for m in model.modules() if isinstance(m, Experts) for p in m.parameters() if p.ndim == 3)


def _activations(model: LM, setting: Setting) -> int:
    """Bytes per token."""
    cfg, d = model.cfg, model.cfg.d_model
    kept, again = [_ends(d), *([Kept(d, 0)] * len(model.stacks()) if cfg.embed.norm else [])], 0
    for layer, block, inputs in _units(model, setting.seq_len):
        if setting.checkpoint_every and layer % setting.checkpoint_every == 0:
            again, block = max(again, block.bytes(setting.precision)), inputs
        kept.append(block)
    return _sum(kept).bytes(setting.precision) + again


def _units(model: LM, seq_len: int) -> Iterator[tuple[int, Kept, Kept]]:
    """Of each block its number, what it keeps, and its inputs alone."""
    cfg, d = model.cfg, model.cfg.d_model
    for stack in model.stacks():
        cross = stack is model and len(model.stacks()) > 1
        for layer in range(len(stack.blocks)):
            yield layer, block_keeps(cfg, layer, seq_len, cross), Kept(d, 0)
    for layer in range(cfg.n_layers, cfg.n_layers + _depth(model)):
        join = Kept(d, 2 * d)  # the norm of the embedding, and the matrix that reads it beside the hidden states
        yield layer, _sum([join, block_keeps(cfg, layer, seq_len), _ends(d)]), _sum([Kept(d, 0), _ends(d)])


def _ends(d: int) -> Kept:
    """The norm before the head, the hidden states, and the loss's gradient by them."""
    return Kept(d, 2 * d)


def _depth(model: LM) -> int:
    """Blocks that predict ahead."""
    return len(model.ahead) if isinstance(model, DecoderLM) else 0


def block_keeps(cfg: AnyModelConfig, layer: int, seq_len: int, cross: bool = False) -> Kept:
    """Of one token in block `layer`, its norms and residual branches included."""
    d = cfg.d_model
    inner = [_attention(cfg), *([_attention(cfg)] if cross else []), _ffn(cfg, layer)]
    if isinstance(cfg.position, T5RelativeConfig):  # its bias has a gradient, for which no kernel is fused
        inner.append(Kept(0, cfg.attention.n_heads * seq_len))
    if isinstance(cfg.block, ParallelConfig):
        shared = cfg.block.shared_norm
        around = Kept(d, d if shared else 2 * d, d if cfg.dropout else 0, d if shared else 0)
        return _sum([around, *inner])
    sublayers = 3 if cross else 2
    norms = 2 if cfg.norm.place == "sandwich" else 1
    around = Kept(norms * sublayers * d, sublayers * d, sublayers * d if cfg.dropout else 0)
    return _sum([around, *inner])


def _attention(cfg: AnyModelConfig) -> Kept:
    """Latents twice (before and after their norm), q, k, v and the weighted values; q and k once more before a norm of theirs."""
    a, d = cfg.attention, cfg.d_model
    if isinstance(a, MLAConfig):
        latents, width = (a.q_rank or 0) + a.kv_rank, a.n_heads * (a.nope_dim + a.rope_dim)
        return Kept(0, 2 * latents + 2 * width + 2 * a.n_heads * a.v_dim, 0, d)
    q, kv = a.n_heads * a.width(d), (a.n_kv_heads or a.n_heads) * a.width(d)
    return Kept(0, 2 * q + 2 * kv + (q + kv if a.qk_norm != "none" else 0), 0, 2 * d)


def _ffn(cfg: AnyModelConfig, layer: int) -> Kept:
    f, d = cfg.ffn, cfg.d_model
    if isinstance(f, MLPConfig):
        return _mlp(f, d)
    if f.is_dense(layer):
        assert f.dense is not None
        return _mlp(f.dense, d)
    return _moe(f, d)


def _moe(cfg: MoEConfig, d: int) -> Kept:
    """Per choice an expert's numbers, its input and its output; the router's input and three rows of scores in float32."""
    one = _mlp(cfg.expert, d)
    times = cfg.top_k + cfg.n_shared
    return Kept(d + 3 * cfg.n_experts, times * one.narrow + 2 * cfg.top_k * d, times * one.masks, times * one.casts)


_STEPS: dict[Activation, int] = {"relu": 1, "relu2": 2, "gelu": 2, "gelu_tanh": 2, "silu": 2, "quick_gelu": 3}
"""Tensors kept from an activation's input to its result, the result included; relu needs its result alone."""


def _mlp(cfg: MLPConfig, d: int) -> Kept:
    """Gated: up and the product too; gpt-oss keeps gate and up before and after they are limited."""
    tensors = _STEPS[cfg.activation] + (2 if cfg.gated else 0) + (2 if cfg.gpt_oss_limit is not None else 0)
    width = cfg.width(d)
    return Kept(0, tensors * width, width if cfg.dropout else 0, d if cfg.gated else 0)


def _sum(parts: Iterable[Kept]) -> Kept:
    return Kept(*(sum(column) for column in zip(*parts, strict=True)))
