"""Mamba-2, without attention and without feed-forwards.  Dao & Gu 2024, arXiv:2405.21060."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.mamba import Mamba
from lm.hf.io.family import Pair, without
from lm.hf.options.mamba import mamba_pairs, require_free_steps
from lm.schema import Tree


class Mamba2(Mamba):
    """Every layer is one mixer, whose heads together are as wide as a multiple of d_model.

    With use_bias, which no published model has, transformers lets padding into the convolution of the tokens behind it; lm does not.
    """

    name = "mamba2"
    architecture = "Mamba2ForCausalLM"
    recurrent_kind = "mamba2"
    unadapted = ("out_proj",)  # whose matrix its kernels read past the module
    fields = {
        **Mamba.fields,
        "recurrent.n_heads": ("num_heads", 128),
        "recurrent.head_dim": ("head_dim", 64),
        "recurrent.state_dim": ("state_size", 128),
        "recurrent.groups": ("n_groups", 8),
        "recurrent.eps": ("layer_norm_epsilon", 1e-5),
        "head.tied": ("tie_word_embeddings", False),
    }
    further = (
        "expand", "chunk_size", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_limit",
        "residual_in_fp32", "rms_norm", "norm_before_gate",
    )  # fmt: skip
    respelled = ()
    fixed = {**without(Mamba.fixed, "recurrent.inner_eps"), "recurrent.kind": "mamba2"}

    def read(self, hf: Tree) -> Tree:
        """Returns a placeholder for attention, which no layer has, as the config wants one."""
        expand, heads, head, d = hf.get("expand", 2), hf.get("num_heads", 128), hf.get("head_dim", 64), hf["hidden_size"]
        if heads * head != expand * d:
            raise ConfigError(f"config.json: {heads} heads of head_dim={head} must be as wide as expand={expand} times hidden_size={d}.")
        require_free_steps(hf)
        return {"attention.kind": "gqa", "attention.n_heads": 1}

    def write(self, ours: Tree) -> Tree:
        return {"expand": ours["recurrent.n_heads"] * ours["recurrent.head_dim"] // ours["d_model"]}

    def mixer(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        return mamba_pairs(here, there, ours)


FAMILY = Mamba2()
