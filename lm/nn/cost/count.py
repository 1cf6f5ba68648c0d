"""Parameters, FLOPs and cache size from the config alone; nothing is allocated."""

from dataclasses import dataclass

from torch import nn

from lm.nn.ffn.moe import MoE, MoEConfig
from lm.nn.mixers.gqa import CrossAttention
from lm.nn.transformer import LM, AnyModelConfig, EncoderDecoderConfig, build_model


@dataclass(frozen=True)
class Counts:
    """Sizes of a model at one sequence length. An encoder-decoder's tokens are pairs: one of the source, one of the target."""

    parameters: int  # shared ones once
    non_embedding: int  # without token and position embeddings and an untied head
    active: int  # of all parameters, those that one token passes
    forward_flops_per_token: int  # 2 per multiply-add, at a full row
    train_flops_per_token: int  # forward and backward: 3 x forward
    cache_bytes_per_token: int  # what the cache holds of one more token while no window is full, at 2 bytes a number


def count(cfg: AnyModelConfig, seq_len: int, bytes_per_number: int = 2) -> Counts:
    """cfg: with vocab_size and max_seq_len set.

    FLOPs: 2 per weight of each matrix that a token passes (the head too) plus those of the scores over the whole row or the window,
    without the factor 1/2 of causality (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Blocks that predict further ahead count.
    """
    model = build_model(cfg, device="meta")
    named = dict(model.named_parameters())
    total = sum(p.numel() for p in named.values())
    embeddings = {"embed.weight", "position.weight", "encoder.position.weight", "head.weight"}
    idle = sum(_idle(module) for module in model.modules() if isinstance(module, MoE))
    shapes = [cfg.attention.cache_shape(cfg.d_model, layer) for layer in range(cfg.n_layers)]
    forward = _matrix_flops(model) + _score_flops(cfg, model, seq_len)
    return Counts(
        parameters=total,
        non_embedding=sum(p.numel() for name, p in named.items() if name not in embeddings),
        active=total - idle,
        forward_flops_per_token=forward,
        train_flops_per_token=3 * forward,
        cache_bytes_per_token=sum(heads * dim for shape in shapes for heads, dim in shape.tensors) * bytes_per_number,
    )


def _matrix_flops(model: LM) -> int:
    """2 per weight of each linear layer that a token passes; of experts, those that it is sent to."""
    linear = sum(2 * module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    experts = sum(module.cfg.top_k * module.cfg.expert.flops(model.cfg.d_model, 0) for module in model.modules() if isinstance(module, MoE))
    return linear + experts


def _score_flops(cfg: AnyModelConfig, model: LM, seq_len: int) -> int:
    layers = [layer for stack in model.stacks() for layer in range(len(stack.blocks))]
    own = sum(cfg.attention.flops(cfg.d_model, min(seq_len, cfg.attention.layer_window(layer) or seq_len)) for layer in layers)
    cross = sum(isinstance(module, CrossAttention) for module in model.modules()) if isinstance(cfg, EncoderDecoderConfig) else 0
    return own + cross * cfg.attention.flops(cfg.d_model, seq_len)


def _idle(layer: MoE) -> int:
    """Weights of the experts that a token is not sent to."""
    cfg: MoEConfig = layer.cfg
    return sum(p.numel() for p in layer.experts.parameters()) * (cfg.n_experts - cfg.top_k) // cfg.n_experts
