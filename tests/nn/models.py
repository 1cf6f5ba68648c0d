"""Small random models for the tests: every tensor is redrawn, so that no bias or norm is invisible and logits have std >= 1."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from lm.config import from_tree
from lm.nn.batch import Batch
from lm.nn.transformer import DecoderConfig, DecoderLM, build_model

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

NORMS = [
    {"kind": "rms", "place": "pre"},
    {"kind": "layer", "place": "pre"},
    {"kind": "layer", "bias": False, "place": "post"},
    {"kind": "rms", "place": "post"},
    {"kind": "rms", "place": "sandwich"},
    {"kind": "layer", "place": "output"},
]
POSITIONS = [{"kind": "none"}, {"kind": "learned"}, {"kind": "sinusoidal"}, {"kind": "rope"}, {"kind": "rope", "fraction": 0.5}]
ATTENTIONS = [
    {"n_heads": 4},
    {"n_heads": 4, "n_kv_heads": 2, "qkv_bias": True, "out_bias": True},
    {"n_heads": 4, "n_kv_heads": 1, "qk_norm": "head", "head_dim": 12},
    {"n_heads": 4, "qk_norm": "full", "window": 7},
    {"n_heads": 4, "n_kv_heads": 2, "window": 5, "global_every": 2, "softcap": 8.0, "scale": 0.3},
]
FFNS = [
    {"kind": "mlp", "activation": activation, "gated": gated, "bias": bias, "hidden": 40}
    for (activation, gated), bias in zip(
        [("silu", True), ("gelu", True), ("relu", False), ("gelu_tanh", False), ("relu2", False), ("relu", True)],
        itertools.cycle([False, True]),
    )
]
BLOCKS = [{"kind": "sequential"}, {"kind": "parallel"}, {"kind": "parallel", "shared_norm": False}]


def all_slot_trees() -> Iterator[dict[str, Any]]:
    """Every combination of slot options that may meet."""
    for norm, position, attention, ffn, block in itertools.product(NORMS, POSITIONS, ATTENTIONS, FFNS, BLOCKS):
        if block["kind"] == "parallel" and norm["place"] != "pre":
            continue
        tied = (ffn["activation"] in ("silu", "relu")) == (block["kind"] == "sequential")
        yield with_kinds(
            BASE | {"norm": norm, "position": position, "attention": attention, "ffn": ffn, "block": block, "head": {"tied": tied}}
        )


def config(**changes: Any) -> DecoderConfig:
    return from_tree(DecoderConfig, with_kinds(BASE | changes))


def with_kinds(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree whose attention and ffn may leave out the usual kind."""
    return tree | {"attention": {"kind": "gqa", **tree["attention"]}, "ffn": {"kind": "mlp", **tree["ffn"]}}


def redrawn(cfg: DecoderConfig, seed: int = 0) -> DecoderLM:
    """A model in eval mode whose every tensor is random, norms and biases too."""
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
