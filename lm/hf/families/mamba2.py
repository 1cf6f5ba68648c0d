"""Mamba-2, without attention and without feed-forwards.  Dao & Gu 2024, arXiv:2405.21060."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.io.family import Family, Pair, module, same
from lm.hf.options.mamba import mamba_pairs, require_free_steps
from lm.schema import Tree


class Mamba2(Family):
    """Every layer is one mixer, whose heads together are as wide as a multiple of d_model.

    With use_bias, which no published model has, transformers lets padding into the convolution of the tokens behind it; lm does not.
    """

    name = "mamba2"
    architecture = "Mamba2ForCausalLM"
    hybrid = True
    prefix = "backbone."
    unadapted = ("out_proj",)  # in this family alone: its kernels read the matrix past the module
    older_endings = {"embeddings.weight": "embedding.weight"}
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": ("max_position_embeddings", 2048),
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "norm.eps": ("layer_norm_epsilon", 1e-5),
        "recurrent.n_heads": ("num_heads", 128),
        "recurrent.head_dim": ("head_dim", 64),
        "recurrent.state_dim": ("state_size", 128),
        "recurrent.groups": ("n_groups", 8),
        "recurrent.kernel": ("conv_kernel", 4),
        "recurrent.kernel_bias": ("use_conv_bias", True),
        "recurrent.bias": ("use_bias", False),
        "recurrent.eps": ("layer_norm_epsilon", 1e-5),
        "head.tied": ("tie_word_embeddings", False),
    }
    further = (
        "expand", "chunk_size", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_limit",
        "residual_in_fp32", "rms_norm", "norm_before_gate",
    )  # fmt: skip
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "position.kind": "none", "recurrent.kind": "mamba2",
        "pattern": ["recurrent"], "ffn.kind": "none", "block.kind": "sequential",
    }  # fmt: skip
    fixed_there = {"hidden_act": "silu", "rescale_prenorm_residual": False}  # set, transformers divides what it has loaded

    def read(self, hf: Tree) -> Tree:
        """Returns a placeholder for attention, which no layer has, as the config wants one."""
        expand, heads, head, d = hf.get("expand", 2), hf.get("num_heads", 128), hf.get("head_dim", 64), hf["hidden_size"]
        if heads * head != expand * d:
            raise ConfigError(f"config.json: {heads} heads of head_dim={head} must be as wide as expand={expand} times hidden_size={d}.")
        require_free_steps(hf)
        return {"attention.kind": "gqa", "attention.n_heads": 1}

    def write(self, ours: Tree) -> Tree:
        return {"expand": ours["recurrent.n_heads"] * ours["recurrent.head_dim"] // ours["d_model"]}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "backbone.embeddings.weight")
        yield same("head.weight", "lm_head.weight")
        yield from module("norm", "backbone.norm_f")
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}.recurrent", f"backbone.layers.{i}"
            yield from module(f"{here}_residual.norm", f"{there}.norm")
            yield from mamba_pairs(here, f"{there}.mixer", ours)


FAMILY = Mamba2()
