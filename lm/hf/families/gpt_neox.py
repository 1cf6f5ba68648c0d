"""GPT-NeoX and Pythia.  Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373."""

from collections.abc import Iterator

from lm.hf.io.family import Family, Pair, module, modules, same
from lm.hf.io.transforms import SplitHeads
from lm.hf.options.rope import read_rope
from lm.schema import Tree


class GPTNeoX(Family):
    """Attention and feed-forward side by side, each with a norm; a quarter of each head rotates; q, k and v are stored as one, by head."""

    name = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    prefix = "gpt_neox."
    theta = 10000.0
    ignored = (r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",)
    partial = 0.25
    built = {"embed_out.": "lm_head."}
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": ("max_position_embeddings", 2048),
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "norm.eps": ("layer_norm_eps", 1e-5),
        "attention.n_heads": "num_attention_heads",
        "attention.qkv_bias": ("attention_bias", True),
        "attention.out_bias": ("attention_bias", True),
        "attention.dropout": ("attention_dropout", 0.0),
        "dropout": ("hidden_dropout", 0.0),
        "ffn.hidden": "intermediate_size",
        "ffn.activation": ("hidden_act", "gelu"),
        "head.tied": ("tie_word_embeddings", False),
    }
    further = ("use_parallel_residual", "rotary_pct", "rotary_emb_base")
    respelled = ("rotary_pct", "rotary_emb_base")  # rope_parameters come first
    fixed = {
        "kind": "decoder", "norm.kind": "layer", "norm.place": "pre", "position.kind": "rope", "attention.kind": "gqa", "ffn.kind": "mlp",
        "ffn.gated": False, "ffn.bias": True,
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        """As transformers, looks at no rope_theta or partial_rotary_factor outside of the rotary parameters, which other families have."""
        block: Tree = {"block.kind": "parallel", "block.shared_norm": False}
        return {
            **(block if hf.get("use_parallel_residual", True) else {"block.kind": "sequential"}),
            **read_rope({**hf, "partial_rotary_factor": hf.get("rotary_pct", 0.25), "rope_theta": hf.get("rotary_emb_base")}),
        }

    def write(self, ours: Tree) -> Tree:
        return {
            "rotary_pct": ours.get("position.fraction"),
            "rotary_emb_base": ours.get("position.theta"),
            "use_parallel_residual": ours["block.kind"] == "parallel",
        }

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "gpt_neox.embed_in.weight")
        yield same("head.weight", "embed_out.weight")
        yield from module("norm", "gpt_neox.final_layer_norm")
        parallel = ours["block.kind"] == "parallel"
        heads = SplitHeads(ours["attention.n_heads"], [ours["attention.head_dim"]] * 3)
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"gpt_neox.layers.{i}"
            yield from module(f"{here}.attention_norm" if parallel else f"{here}.attention_residual.norm", f"{there}.input_layernorm")
            yield from module(f"{here}.ffn_norm" if parallel else f"{here}.ffn_residual.norm", f"{there}.post_attention_layernorm")
            yield from modules(tuple(f"{here}.attention.{name}" for name in "qkv"), f"{there}.attention.query_key_value", heads)
            yield from module(f"{here}.attention.o", f"{there}.attention.dense")
            yield from module(f"{here}.ffn.up", f"{there}.mlp.dense_h_to_4h")
            yield from module(f"{here}.ffn.down", f"{there}.mlp.dense_4h_to_h")


FAMILY = GPTNeoX()
