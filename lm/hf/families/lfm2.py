"""LFM2, dense.  Liquid AI 2025, arXiv:2511.23404."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, without
from lm.hf.io.transforms import Squeeze
from lm.hf.options.pattern import read_pattern, write_pattern
from lm.schema import Tree


class LFM2(Llama):
    """Short convolutions in most layers, attention with a norm on each head's queries and keys in the others."""

    name = "lfm2"
    architecture = "Lfm2ForCausalLM"
    last_norm = "model.embedding_norm"
    recurrent_kind = "short_conv"
    theta = 1000000.0
    renamed = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    fields = {
        **without(Llama.fields, "*bias", "*dropout", "*head_dim", "*activation"),
        "norm.eps": ("norm_eps", 1e-5),
        "head.tied": ("tie_word_embeddings", True),
    }
    further: ClassVar[tuple[str, ...]] = (
        "layer_types", "full_attn_idxs", "conv_L_cache", "block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim",
        "block_dim", "block_mlp_init_scale", "block_out_init_scale", "block_norm_eps", "block_use_swiglu", "block_use_xavier_init",
        "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
    )  # fmt: skip
    respelled: ClassVar[tuple[str, ...]] = (
        "block_auto_adjust_ff_dim", "block_dim", "block_ffn_dim_multiplier", "block_multiple_of", "conv_dim", "intermediate_size",
        "layer_types",
    )  # fmt: skip
    fixed = {**Llama.fixed, "attention.qk_norm": "head", "ffn.activation": "silu"}
    fixed_there = {"conv_bias": False}

    def read(self, hf: Tree) -> Tree:
        n = hf["num_hidden_layers"]
        attends = range(n) if hf.get("full_attn_idxs") is None else hf["full_attn_idxs"]
        types = hf.get("layer_types") or ["full_attention" if i in attends else "conv" for i in range(n)]
        pattern = read_pattern(types, n, ("conv",))
        conv = {"recurrent": {"kind": "short_conv", "kernel": hf.get("conv_L_cache", 3)}} if "recurrent" in pattern else {}
        if not hf.get("block_auto_adjust_ff_dim", True):
            return {"pattern": pattern, **conv}
        of, hidden = hf.get("block_multiple_of", 256), int(2 * hf["intermediate_size"] / 3)
        hidden = int((hf.get("block_ffn_dim_multiplier") or 1.0) * hidden)
        return {"pattern": pattern, "ffn.hidden": -(-hidden // of) * of, **conv}

    def write(self, ours: Tree) -> Tree:
        kernel = ours.get("recurrent.kernel", 3)
        width = dict.fromkeys(("block_dim", "conv_dim"), ours["d_model"])  # transformers reads neither, vLLM needs both
        adjusted = {"block_auto_adjust_ff_dim": False, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, **width}
        return {"layer_types": write_pattern(ours, "conv"), "conv_L_cache": kernel, **adjusted}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for slot in ("attention", "recurrent"):
            yield from module(f"{here}.{slot}_residual.norm", f"{there}.operator_norm")
        yield from module(f"{here}.ffn_residual.norm", f"{there}.ffn_norm")
        yield from module(f"{here}.recurrent.bcv", f"{there}.conv.in_proj")
        yield from module(f"{here}.recurrent.o", f"{there}.conv.out_proj")
        yield Pair((f"{here}.recurrent.kernel",), (f"{there}.conv.conv.weight",), Squeeze())
        for name, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")):
            yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{theirs}")
        for name in "qk":
            yield from module(f"{here}.attention.{name}_norm", f"{there}.self_attn.{name}_layernorm")
        for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            yield from module(f"{here}.ffn.{name}", f"{there}.feed_forward.{theirs}")


FAMILY = LFM2()
