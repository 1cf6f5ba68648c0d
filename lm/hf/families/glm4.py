"""GLM-4-0414.  GLM team 2024, arXiv:2406.12793."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, modules, sandwich, without
from lm.hf.io.transforms import Split
from lm.schema import Tree


class GLM4(Llama):
    """Norms before and behind the sublayers, half of each head rotated by neighbours, gate and up stored as one."""

    name = "glm4"
    architecture = "Glm4ForCausalLM"
    partial = 0.5
    fields = {
        **without(Llama.fields, "ffn.bias", "attention.out_bias"),
        "norm.eps": ("rms_norm_eps", 1.5625e-07),
        "attention.n_kv_heads": ("num_key_value_heads", 2),
        "attention.head_dim": ("head_dim", 128),
        "attention.qkv_bias": ("attention_bias", True),
    }
    fixed = {**Llama.fixed, "norm.place": "sandwich", "position.interleaved": True}
    fixed_there = {"pad_token_id": None}  # where none is told, transformers takes 151329

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        return sandwich(here, there, ("input", "post_self_attn"), ("post_attention", "post_mlp"))

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from modules((f"{here}.ffn.gate", f"{here}.ffn.up"), f"{there}.mlp.gate_up_proj", Split([ours["ffn.hidden"]] * 2))
        yield from module(f"{here}.ffn.down", f"{there}.mlp.down_proj")


FAMILY = GLM4()
