"""MPT.  MosaicML 2023, "Introducing MPT-7B"."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.io.family import Family, Pair, module, modules, same
from lm.hf.io.transforms import Split
from lm.schema import Tree

_ALIKE = {
    "attention_residual.norm": "norm_1", "ffn_residual.norm": "norm_2", "attention.o": "attn.out_proj", "ffn.up": "ffn.up_proj",
    "ffn.down": "ffn.down_proj",
}  # fmt: skip
_NEEDED: Tree = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
}
"""Of attn_config; transformers' class computes these alone, but for clip_qkv."""


class MPT(Family):
    """ALiBi, no biases, neither in norms nor in linear layers, and a feed-forward of GELU four times as wide."""

    name = "mpt"
    architecture = "MptForCausalLM"
    prefix = "transformer."
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": ("max_seq_len", 2048),
        "d_model": "d_model",
        "n_layers": "n_layers",
        "norm.eps": ("layer_norm_epsilon", 1e-5),
        "attention.n_heads": "n_heads",
        "head.tied": ("tie_word_embeddings", True),
    }
    further = ("attn_config",)
    respelled = further
    idle = ("learned_pos_emb", "embedding_fraction", "norm_type", "init_device", "init_config", "tokenizer_name", "verbose")
    fixed = {
        "kind": "decoder", "norm.kind": "layer", "norm.place": "pre", "norm.bias": False, "position.kind": "alibi", "attention.kind": "gqa",
        "ffn.kind": "mlp", "ffn.gated": False, "ffn.activation": "gelu", "block.kind": "sequential",
    }  # fmt: skip
    fixed_there = {"no_bias": True, "expansion_ratio": 4, "logit_scale": None}

    def read(self, hf: Tree) -> Tree:
        said = hf.get("attn_config") or {}
        if other := next((key for key, needed in _NEEDED.items() if said.get(key, needed) != needed), None):
            raise ConfigError(
                f"config.json: attn_config: {other}={said[other]!r} has no place in lm's mpt, which has {_NEEDED[other]!r}."
                " Import another model."
            )
        dropout = said.get("attn_pdrop", 0.0)
        return {"attention.scale": said.get("softmax_scale"), "attention.dropout": dropout, "dropout": dropout}

    def write(self, ours: Tree) -> Tree:
        """Without dropout, which transformers' class takes as a whole number alone."""
        return {"attn_config": {**_NEEDED, "softmax_scale": ours["attention.scale"]}}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "transformer.wte.weight")
        yield same("head.weight", "lm_head.weight")
        yield from module("norm", "transformer.norm_f")
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"transformer.blocks.{i}"
            yield from modules(tuple(f"{here}.attention.{name}" for name in "qkv"), f"{there}.attn.Wqkv", Split([ours["d_model"]] * 3))
            for mine, theirs in _ALIKE.items():
                yield from module(f"{here}.{mine}", f"{there}.{theirs}")


FAMILY = MPT()
