"""Small random models for the tests: every tensor is redrawn, so that no bias or norm is invisible and logits have std >= 1."""

import itertools
from typing import Any

import torch

from lm.nn.batch import Batch
from lm.nn.transformer import LM, DecoderConfig, DecoderLM, ModelConfig, build_model
from lm.schema import from_tree

VOCAB = 61

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_seq_len": 48,
    "d_model": 32,
    "n_layers": 3,
    "norm": {"kind": "rms"},
    "position": {"kind": "rope"},
    "attention": {"n_heads": 4},
    "ffn": {"hidden": 40},
}

NORMS: list[dict[str, Any]] = [
    {"kind": "rms", "place": "pre"},
    {"kind": "layer", "place": "pre"},
    {"kind": "layer", "bias": False, "place": "post"},
    {"kind": "rms", "place": "post"},
    {"kind": "rms", "place": "sandwich"},
    {"kind": "layer", "place": "output"},
    {"kind": "rms", "zero_centered": True, "place": "sandwich"},
    {"kind": "rms", "zero_centered": True, "place": "pre"},
]
SCALINGS: list[dict[str, Any]] = [
    {"kind": "linear", "factor": 4.0},
    {"kind": "dynamic", "factor": 2.0, "original_len": 16},
    {"kind": "yarn", "factor": 3.0, "original_len": 16, "beta_fast": 4.0},
    {"kind": "yarn", "factor": 3.0, "original_len": 16, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
    {"kind": "llama3", "factor": 8.0, "original_len": 16},
    {"kind": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0], "original_len": 16},
]
POSITIONS: list[dict[str, Any]] = [
    {"kind": "none"},
    {"kind": "learned"},
    {"kind": "sinusoidal"},
    {"kind": "rope"},
    {"kind": "rope", "fraction": 0.5},
    {"kind": "rope", "interleaved": True},
    {"kind": "rope", "interleaved": True, "fraction": 0.5, "theta": 100.0},
    {"kind": "rope", "none_every": 2},
    *({"kind": "rope", "scaling": scaling} for scaling in SCALINGS),
    {"kind": "alibi"},
    {"kind": "t5_relative", "n_buckets": 8, "max_distance": 12},
]
MLA: dict[str, Any] = {"kind": "mla", "n_heads": 4, "kv_rank": 16, "nope_dim": 6, "rope_dim": 8, "v_dim": 10}
ATTENTIONS: list[dict[str, Any]] = [
    {"n_heads": 4},
    {"n_heads": 4, "n_kv_heads": 2, "qkv_bias": True, "out_bias": True},
    {"n_heads": 4, "n_kv_heads": 1, "qk_norm": "head", "head_dim": 12},
    {"n_heads": 4, "qk_norm": "full", "window": 7},
    {"n_heads": 4, "n_kv_heads": 2, "window": 5, "global_every": 2, "softcap": 8.0, "scale": 0.3},
    {"n_heads": 4, "gpt_oss_sinks": True, "out_bias": True},
    {"n_heads": 4, "n_kv_heads": 2, "gpt_oss_sinks": True, "window": 6, "global_every": 3, "qkv_bias": True},
    {"n_heads": 4, "n_kv_heads": 1, "gpt_oss_sinks": True, "softcap": 5.0},
    {"n_heads": 6, "head_dim": 8, "window": 2, "global_every": 2},  # 6 is no power of two (ALiBi)
    MLA,
    MLA | {"q_rank": 12, "bias": True, "scale": 0.4},
]
FFNS: list[dict[str, Any]] = [
    {"kind": "mlp", "activation": activation, "gated": gated, "bias": bias, "hidden": 40}
    for (activation, gated), bias in zip(
        [("silu", True), ("gelu", True), ("relu", False), ("gelu_tanh", False), ("relu2", False), ("relu", True)],
        itertools.cycle([False, True]),
    )
]
CONV: dict[str, Any] = {"kind": "short_conv", "kernel": 3}
MIXING: list[dict[str, Any]] = [  # which layers of three attend
    {},
    {"recurrent": CONV, "pattern": ["recurrent", "attention"]},
    {"recurrent": {"kind": "short_conv", "kernel": 5}, "pattern": ["attention", "recurrent", "recurrent"]},
]
EXPERT: dict[str, Any] = {"kind": "mlp", "hidden": 16}
GPT_OSS: dict[str, Any] = {"kind": "mlp", "hidden": 16, "activation": "quick_gelu", "bias": True, "gpt_oss_limit": 1.0}
MIXTURES: list[dict[str, Any]] = [
    {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": EXPERT},
    {
        "kind": "moe", "n_experts": 4, "top_k": 1, "expert": EXPERT | {"gated": False, "activation": "relu"}, "every": 2,
        "dense": {"kind": "mlp", "hidden": 24}, "router": {"kind": "softmax", "normalize": False},
    },
    {
        "kind": "moe", "n_experts": 6, "top_k": 2, "expert": EXPERT, "n_shared": 1, "first_dense": 1,
        "dense": {"kind": "mlp", "hidden": 24}, "router": {"kind": "sigmoid", "n_groups": 3, "top_groups": 2, "scale": 2.5},
    },
    {"kind": "moe", "n_experts": 4, "top_k": 3, "expert": EXPERT, "router": {"kind": "sigmoid", "normalize": False}, "reference": True},
    {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": GPT_OSS, "router": {"kind": "softmax", "bias": True}},
]  # fmt: skip
FFNS += [GPT_OSS | {"hidden": 40}, *MIXTURES]
BLOCKS: list[dict[str, Any]] = [
    {"kind": "sequential"},
    {"kind": "parallel"},
    {"kind": "parallel", "shared_norm": False},
    {"kind": "sequential", "residual_scale": 0.6},
]
HEADS: list[dict[str, Any]] = [
    {"tied": True},
    {"tied": False, "bias": True},
    {"tied": True, "scale": 0.5, "softcap": 10.0},
    {"tied": False, "transform": "gelu"},
    {"tied": True, "transform": "gelu_tanh", "bias": True},
]
EMBEDS: list[dict[str, Any]] = [{}, {"scale": 1.7, "norm": True}, {"segments": 3}, {"norm": True, "segments": 2}]


def config(**changes: Any) -> DecoderConfig:
    return from_tree(DecoderConfig, with_kinds(BASE | changes))


def with_kinds(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree whose attention and ffn may leave out the usual kind."""
    return tree | {"attention": {"kind": "gqa", **tree["attention"]}, "ffn": {"kind": "mlp", **tree["ffn"]}}


def redrawn(cfg: DecoderConfig, seed: int = 0) -> DecoderLM:
    """A decoder in eval mode whose every tensor is random, norms and biases too."""
    model = redrawn_any(cfg, seed)
    assert isinstance(model, DecoderLM)
    return model


def redrawn_any(cfg: ModelConfig, seed: int = 0) -> LM:
    """The same for every kind of model."""
    model = build_model(cfg, seed=seed).eval()
    redraw(model, seed)
    return model


@torch.no_grad()
def redraw(model: torch.nn.Module, seed: int = 0) -> None:
    source = torch.Generator().manual_seed(seed)
    for _, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=source)
        p.copy_(noise * 0.9 / p.shape[-1] ** 0.5 * 1.6 if p.ndim >= 2 else p + 0.5 * noise)
    for name, p in model.named_parameters():
        if "embed.weight" in name or "wte" in name or "embed_tokens" in name or "head" in name:
            p.mul_(2.0)


def tokens(b: int, s: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (b, s), generator=torch.Generator().manual_seed(seed))


def packed(lengths: list[int], seed: int = 1) -> Batch:
    """One row of documents of these lengths, positions restarting."""
    documents = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return Batch(tokens(1, sum(lengths), seed), positions=positions, documents=documents)
