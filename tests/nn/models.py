"""Values of the slots for the tests, and small random decoders of them."""

import itertools
from typing import Any

import torch
from torch import Tensor

from lm.nn.batch import Batch
from lm.nn.transformer import DecoderConfig, DecoderLM
from lm.schema import from_tree
from lm.testing.models import BASE, random_model, tokens

CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # of values of size 1: some millions of roundings of 1e-16

NORMS: list[dict[str, Any]] = [
    {"kind": "rms", "place": "pre"},
    {"kind": "layer", "place": "pre"},
    {"kind": "layer", "bias": False, "place": "post"},
    {"kind": "rms", "place": "post"},
    {"kind": "rms", "place": "sandwich"},
    {"kind": "layer", "place": "output"},
    {"kind": "rms", "zero_centered": True, "place": "sandwich"},
    {"kind": "rms", "zero_centered": True, "place": "pre"},
    {"kind": "rms", "weight": False, "place": "pre"},
    {"kind": "layer", "weight": False, "bias": False, "place": "pre"},
]
SCALINGS: list[dict[str, Any]] = [
    {"kind": "linear", "factor": 4.0},
    {"kind": "dynamic", "factor": 2.0, "original_len": 16},
    {"kind": "yarn", "factor": 3.0, "original_len": 16, "beta_fast": 4.0},
    {"kind": "yarn", "factor": 3.0, "original_len": 16, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
    {"kind": "llama3", "factor": 8.0, "original_len": 16},
    {"kind": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0], "original_len": 16},
    {"kind": "proportional", "partial_rotary_factor": 0.5},
]
POSITIONS: list[dict[str, Any]] = [
    {"kind": "none"},
    {"kind": "learned"},
    {"kind": "sinusoidal"},
    {"kind": "rope"},
    {"kind": "rope", "fraction": 0.5},
    {"kind": "rope", "interleaved": True},
    {"kind": "rope", "interleaved": True, "fraction": 0.5, "theta": 100.0},
    {"kind": "rope", "none_every": 2, "none_at": 0, "local_theta": 50.0},
    *({"kind": "rope", "scaling": scaling} for scaling in SCALINGS),
    {"kind": "alibi"},
    {"kind": "t5_relative", "n_buckets": 8, "max_distance": 12},
    {"kind": "t5_relative", "n_buckets": 6, "max_distance": 9, "shared": False},
]
MLA: dict[str, Any] = {"kind": "mla", "n_heads": 4, "kv_rank": 16, "nope_dim": 6, "rope_dim": 8, "v_dim": 10}
ATTENTIONS: list[dict[str, Any]] = [
    {"n_heads": 4},
    {"n_heads": 4, "n_kv_heads": 2, "qkv_bias": True, "out_bias": True, "out_gate": "element"},
    {"n_heads": 4, "n_kv_heads": 1, "qk_norm": "head", "head_dim": 12, "out_gate": "head"},
    {"n_heads": 4, "qk_norm": "full", "window": 7},
    {"n_heads": 4, "n_kv_heads": 2, "window": 5, "global_every": 2, "softcap": 8.0, "scale": 0.3, "value_residual": True},
    {"n_heads": 4, "gpt_oss_sinks": True, "out_bias": True},
    {"n_heads": 4, "n_kv_heads": 2, "gpt_oss_sinks": True, "window": 6, "global_every": 3, "qkv_bias": True},
    {"n_heads": 4, "n_kv_heads": 1, "gpt_oss_sinks": True, "softcap": 5.0},
    {"n_heads": 6, "head_dim": 8, "window": 2, "global_every": 2, "global_at": 0},  # 6 is no power of two (ALiBi)
    MLA,
    MLA | {"q_rank": 12, "bias": True, "scale": 0.4, "query_growth": {"rate": 0.6, "every": 5}},
    {"n_heads": 4, "n_kv_heads": 2, "window": 4, "keep_first": 3, "global_every": 2, "qk_norm": "head", "out_gate": "head"},
    {"kind": "differential", "n_heads": 8, "n_kv_heads": 4, "head_dim": 8, "window": 7, "qk_norm": "head", "out_gate": "head"},
    {"n_heads": 4, "n_kv_heads": 2, "qk_norm": "rotated", "qkv_bias": True},
    {"n_heads": 4, "n_kv_heads": 2, "query_growth": {"rate": 0.6, "every": 5}, "window": 20, "global_every": 2},
    {"n_heads": 4, "n_kv_heads": 2, "window": 5, "chunked": True, "global_every": 2, "global_at": 0},
    {"n_heads": 4, "n_kv_heads": 1, "qk_norm": "l2", "out_bias": True},
    {"n_heads": 4, "n_kv_heads": 2, "forget": True, "window": 6, "global_every": 2, "qk_norm": "head", "out_gate": "head"},
    {"n_heads": 4, "n_kv_heads": 2, "qk_norm": "rotated", "window": 8, "value_embedding": {"every": 1, "channels": 7, "most": 3.0}},
    {"n_heads": 4, "n_kv_heads": 2, "inner_norm": {"kind": "layer"}, "out_gate": "element"},
    {
        "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "window": 6, "global_every": 2, "qk_norm": "head", "value_norm": True,
        "global_heads": {"n_kv_heads": 1, "head_dim": 12, "values": "keys"},
    },
    {"n_heads": 4, "n_kv_heads": 2, "values": "keys", "shared_layers": 1, "out_gate": "head"},
    {"n_heads": 4, "n_kv_heads": 2, "window": 9, "qk_norm": "head", "indexer": {"n_heads": 3, "head_dim": 10, "top_k": 4}},
    MLA | {"q_rank": 12, "indexer": {"n_heads": 5, "head_dim": 8, "top_k": 6}},
]  # fmt: skip
FFNS: list[dict[str, Any]] = [
    {"kind": "mlp", "activation": activation, "gated": gated, "bias": bias, "hidden": 40}
    for (activation, gated), bias in zip(
        [("silu", True), ("gelu", True), ("relu", False), ("gelu_tanh", False), ("relu2", False), ("relu", True), ("xielu", False)],
        itertools.cycle([False, True]),
    )
] + [{"kind": "mlp", "hidden": 40, "inner_norm": {"kind": "rms"}, "gate_scale": 0.6}]
FFNS += [{"kind": "mlp", "hidden": 40, "last": {"n": 1, "hidden": 56}}]
CONV: dict[str, Any] = {"kind": "short_conv", "kernel": 3}
DELTA: dict[str, Any] = {"kind": "gated_delta", "n_heads": 4, "n_k_heads": 2, "k_dim": 6, "v_dim": 10, "kernel": 3}
MAMBA2: dict[str, Any] = {"kind": "mamba2", "n_heads": 4, "head_dim": 12, "state_dim": 6, "groups": 2, "kernel": 3}
GLA: dict[str, Any] = {"kind": "gla", "n_heads": 4, "n_k_heads": 2, "k_dim": 6, "v_dim": 10, "kernel": 3, "rank": 5}
RG_LRU: dict[str, Any] = {"kind": "rg_lru", "width": 24, "n_heads": 3, "kernel": 3}
MAMBA: dict[str, Any] = {"kind": "mamba", "width": 20, "state_dim": 5, "rank": 3, "kernel": 3}
SINGLE: dict[str, Any] = {"kind": "single"}
FAR: dict[str, Any] = {"n_buckets": 6, "max_distance": 9}
MIXING: list[dict[str, Any]] = [  # which layers of three attend, and which are a feed-forward alone; and what attends beside no rotation
    {},
    {"recurrent": CONV, "pattern": ["recurrent", "attention"]},
    {"recurrent": {"kind": "short_conv", "kernel": 5}, "pattern": ["attention", "recurrent", "recurrent"]},
    {"recurrent": DELTA, "pattern": ["recurrent", "recurrent", "attention"]},
    {"recurrent": DELTA | {"negative": True, "n_k_heads": None}, "pattern": ["recurrent", "attention"]},
    {"recurrent": DELTA | {"channels": True}, "pattern": ["recurrent", "attention"]},
    {"recurrent": GLA, "pattern": ["recurrent", "attention"]},
    {"recurrent": GLA | {"decay": "head", "n_k_heads": None}, "pattern": ["recurrent", "recurrent", "attention"]},
    {"recurrent": GLA | {"decay": "constant"}, "pattern": ["attention", "recurrent"]},
    {"recurrent": MAMBA2, "pattern": ["recurrent", "attention"]},
    {"recurrent": MAMBA2 | {"groups": 1, "kernel_bias": False, "bias": True}, "pattern": ["attention", "recurrent", "recurrent"]},
    {"recurrent": RG_LRU, "pattern": ["recurrent", "recurrent", "attention"]},
    {"recurrent": MAMBA, "pattern": ["recurrent", "attention"]},
    {"recurrent": MAMBA | {"inner_eps": 1e-5, "kernel_bias": False, "bias": True}, "pattern": ["recurrent", "attention", "recurrent"]},
    {"recurrent": MAMBA | {"inner_eps": 1e-5, "inner_weight": True}, "pattern": ["attention", "recurrent", "recurrent"]},
    {"block": SINGLE, "pattern": ["attention", "ffn"]},
    {"recurrent": MAMBA2 | {"gated_norm": False, "input_scales": [0.5, 1.2, 0.7, 1.4, 0.8]}, "pattern": ["both"]},
    {"recurrent": CONV, "pattern": ["recurrent", "both", "attention"]},
    {"block": SINGLE, "recurrent": MAMBA2 | {"step_floor": 0.02}, "pattern": ["recurrent", "ffn", "attention"]},
    {"attention": {"n_heads": 4, "n_kv_heads": 2, "window": 7, "qk_norm": "head", "disentangled": FAR}, "position": {"kind": "none"}},
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
        "shared_hidden": 12, "shared_gate": True,
        "dense": {"kind": "mlp", "hidden": 24}, "router": {"kind": "sigmoid", "n_groups": 3, "top_groups": 2, "scale": 2.5},
    },
    {
        "kind": "moe", "n_experts": 4, "top_k": 3, "expert": EXPERT, "router": {"kind": "sigmoid", "normalize": False}, "reference": True,
        "out_norm": {"kind": "rms"},
    },
    {"kind": "moe", "n_experts": 4, "top_k": 2, "expert": GPT_OSS, "router": {"kind": "softmax", "bias": True}},
    {
        "kind": "moe", "n_experts": 4, "top_k": 2, "expert": EXPERT | {"gated": False, "activation": "relu2"}, "n_shared": 1,
        "latent_dim": 12,
    },
    {
        "kind": "moe", "n_experts": 5, "top_k": 2, "expert": EXPERT, "n_shared": 1, "weigh_inputs": True,
        "router": {"kind": "plain_sigmoid", "normalize": False},
    },
    {
        "kind": "moe", "n_experts": 4, "top_k": 2, "expert": EXPERT, "n_shared": 1,
        "router": {"kind": "sigmoid", "corrected": "logits", "floor": 0.0},
    },
]  # fmt: skip
BESIDE: dict[str, Any] = {
    "kind": "beside", "n_experts": 4, "top_k": 2, "expert": EXPERT, "mlp": {"kind": "mlp", "hidden": 24}, "norms": {"kind": "rms"},
    "router": {"kind": "normed_softmax"},
}  # fmt: skip
FFNS += [GPT_OSS | {"hidden": 40}, *MIXTURES, BESIDE, {"kind": "none"}]
BLOCKS: list[dict[str, Any]] = [
    {"kind": "sequential"},
    {"kind": "parallel"},
    {"kind": "parallel", "shared_norm": False, "layer_scale": 0.7},
    {"kind": "sequential", "residual_scale": 0.6, "layer_scale": 1.5},
    {"kind": "sequential", "attention_scale": 0.7, "ffn_scale": 1.4},
    {"kind": "sequential", "stream_gain": True},
]
RESIDUALS: list[dict[str, Any]] = [
    {"kind": "plain"},
    {"kind": "x0"},
    {"kind": "unet"},
    {"kind": "dense"},
    {"kind": "loop", "times": 2},
    {"kind": "hyper", "streams": 3, "sinkhorn": 4},
]
HEADS: list[dict[str, Any]] = [
    {"tied": True},
    {"tied": False, "bias": True},
    {"tied": True, "scale": 0.8, "softcap": 10.0},
    {"tied": False, "transform": "gelu", "transform_bias": False},
    {"tied": True, "transform": "gelu_tanh", "bias": True},
]
EMBEDS: list[dict[str, Any]] = [
    {},
    {"scale": 1.7, "norm": True},
    {"segments": 3},
    {"norm": True, "segments": 2},
    {"scale": 1.3, "ngrams": {"rows": 37, "sizes": [2, 4]}},
    {"scale": 1.3, "per_layer": {"channels": 6}},
    {"scale": 1.3, "factorized": {"width": 12}},
    {"norm": True, "segments": 2, "factorized": {"width": 12, "bias": True, "widened": "sum"}},
    {"norm": True, "smear": {"channels": 5}},
]
SMEARED: dict[str, Any] = {"embed": EMBEDS[-1]}


def config(**changes: Any) -> DecoderConfig:
    return from_tree(DecoderConfig, with_kinds(BASE | changes))


def with_kinds(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree whose attention and ffn may leave out the usual kind."""
    return tree | {"attention": {"kind": "gqa", **tree["attention"]}, "ffn": {"kind": "mlp", **tree["ffn"]}}


BIASED: dict[str, Any] = {  # experts that a bias balances, in float32 whatever the other weights are
    "kind": "moe", "n_experts": 6, "top_k": 2, "expert": {"kind": "mlp", "hidden": 24}, "router": {"kind": "sigmoid", "bias_rate": 0.1},
}  # fmt: skip


def redrawn(cfg: DecoderConfig, seed: int = 0) -> DecoderLM:
    """A decoder in eval mode whose every tensor is random, norms and biases too."""
    model = random_model(cfg, seed)
    assert isinstance(model, DecoderLM)
    return model


def packed(lengths: list[int], seed: int = 1) -> Batch:
    """One row of documents of these lengths, positions restarting."""
    documents = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return Batch(tokens(1, sum(lengths), seed), positions=positions, documents=documents)


def near(found: Tensor, expected: Tensor) -> None:
    """Of what computes in float32 for good: within 3e-5 of the size of what is expected, some hundred roundings of 6e-8."""
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=3e-5 * size)
