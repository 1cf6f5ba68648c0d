"""Parameters, FLOPs and cache size from the config alone; nothing is allocated."""

from dataclasses import dataclass

from torch import nn

from lm.nn.model_config import ModelConfig
from lm.nn.transformer import build_model
from lm.ops.cache.cache import numbers


@dataclass(frozen=True)
class Counts:
    """Sizes of a model at one sequence length. An encoder-decoder's tokens are pairs: one of the source, one of the target."""

    parameters: int  # shared ones once
    non_embedding: int  # without token, value and position embeddings and an untied head
    active: int  # of all parameters, those that one token passes
    forward_flops_per_token: int  # 2 per multiply-add, at a full row
    train_flops_per_token: int  # forward and backward: 3 x forward
    cache_bytes_per_token: int  # what the cache holds of one more token while no window is full, at 2 bytes a number
    cache_bytes_per_row: int  # what the cache holds of a row whatever its length: states of fixed size


def count(cfg: ModelConfig, seq_len: int, bytes_per_number: int = 2) -> Counts:
    """cfg: with vocab_size and max_seq_len set.

    FLOPs: 2 per weight of each matrix that a token passes (the head too) plus those of the scores over the whole row or the window,
    without the factor 1/2 of causality (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Blocks of multi-token prediction count, and
    the head that reads them once more.
    """
    model = build_model(cfg, device="meta")
    named = dict(model.named_parameters())
    total = sum(p.numel() for p in named.values())
    embeddings = model.tables() | {"position.weight", "encoder.position.weight", "head.weight"}
    per_token, per_row = numbers(model.states())
    passes, blocks = cfg.residual.passes(), sum(_flops_of_linears(stack.blocks) for stack in model.stacks())
    forward = _flops_of_linears(model) + (passes - 1) * blocks
    forward += passes * sum(parts.flops(seq_len) for stack in model.stacks() for parts in stack.parts)
    further = sum(cfg.parts(cfg.n_layers + k).flops(seq_len) for k in range(len(model.mtp)))
    forward += sum(cfg.residual.flops(cfg.d_model, len(stack.parts), stack.parts[0].sublayers) for stack in model.stacks())
    forward += cfg.embed.flops(cfg.d_model) * len(model.stacks())
    forward += further + _flops_of_linears(model.head) * len(model.mtp)
    return Counts(
        parameters=total,
        non_embedding=sum(p.numel() for name, p in named.items() if name not in embeddings),
        active=total - sum(mixture.idle() for mixture in model.mixtures().values()),
        forward_flops_per_token=forward,
        train_flops_per_token=3 * forward,
        cache_bytes_per_token=per_token * bytes_per_number,
        cache_bytes_per_row=per_row * bytes_per_number,
    )


def _flops_of_linears(module: nn.Module) -> int:
    return sum(2 * each.weight.numel() for each in module.modules() if isinstance(each, nn.Linear))
