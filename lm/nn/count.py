"""Parameters, FLOPs and cache size from the config alone; nothing is allocated."""

from dataclasses import dataclass

from lm.nn.transformer import DecoderConfig, build_model


@dataclass(frozen=True)
class Counts:
    """Sizes of a model at one sequence length."""

    parameters: int  # shared ones once
    non_embedding: int  # without token and position embeddings and an untied head
    forward_flops_per_token: int  # 2 per multiply-add, at a full row
    train_flops_per_token: int  # forward and backward: 3 x forward
    cache_bytes_per_token: int  # keys and values of one more token while no window is full, at 2 bytes a number


def count(cfg: DecoderConfig, seq_len: int, bytes_per_number: int = 2) -> Counts:
    """cfg: with vocab_size and max_seq_len set.

    FLOPs: 2 per weight of each matrix that a token passes (the head too) plus 4 h c per key that it is compared with, taken as the whole
    row or the window, without the factor 1/2 of causality (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    model = build_model(cfg, device="meta")
    named = dict(model.named_parameters())
    embeddings = {"embed.weight", "position.weight", "head.weight"}
    non_embedding = sum(p.numel() for name, p in named.items() if name not in embeddings)
    matrices = sum(named[name].numel() for name in model.matrices()) + model.head.weight.numel()
    shapes = [cfg.attention.cache_shape(cfg.d_model, layer) for layer in range(cfg.n_layers)]
    score = 4 * cfg.attention.n_heads * cfg.attention.width(cfg.d_model)
    attention = sum(score * min(seq_len, shape.window or seq_len) for shape in shapes)
    cached = sum(heads * dim for shape in shapes for heads, dim in shape.tensors)
    forward = 2 * matrices + attention
    return Counts(sum(p.numel() for p in named.values()), non_embedding, forward, 3 * forward, cached * bytes_per_number)
