"""RecurrentGemma.  Botev et al. 2024, arXiv:2404.07839; Griffin: De et al. 2024, arXiv:2402.19427."""

from collections.abc import Iterator

import torch

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, same, without
from lm.hf.io.transforms import Squeeze, Transpose
from lm.hf.options.rope import read_rope
from lm.schema import Tree

_GELU = "gelu_pytorch_tanh"
_UNUSED = ("embeddings_scale_by_sqrt_dim", "w_init_variance_scale", "final_w_init_variance_scale")


class RecurrentGemma(Llama):
    """The RG-LRU in two of three layers, attention within a window in the others, half of each head rotated, and norms around 0.

    In transformers padding in front of a row enters the convolutions of its first tokens; in lm it does not.
    """

    name = "recurrent_gemma"
    architecture = "RecurrentGemmaForCausalLM"
    last_norm = "model.final_norm"
    recurrent_kind = "rg_lru"
    partial = 0.5
    fields = {
        **without(Llama.fields, "attention.out_bias", "ffn.bias", "ffn.hidden"),
        "max_seq_len": ("max_position_embeddings", 8192),
        "attention.window": ("attention_window_size", 2048),
        "ffn.activation": ("hidden_activation", _GELU),
        "head.softcap": ("logits_soft_cap", 30.0),
        "head.tied": ("tie_word_embeddings", True),
    }
    further = ("block_types", "lru_width", "conv1d_width", "intermediate_size", *_UNUSED)
    respelled = ("block_types", "lru_width", "conv1d_width")
    fixed = {**Llama.fixed, "norm.zero_centered": True, "attention.out_bias": True, "ffn.bias": True}

    def read(self, hf: Tree) -> Tree:
        pattern, width = list(hf.get("block_types") or ("recurrent", "recurrent", "attention")), hf["hidden_size"]
        if "recurrent" in pattern and (act := hf.get("hidden_activation", _GELU)) != _GELU:
            raise ConfigError(f"config.json: hidden_activation={act!r} is of the recurrent layers' gates too, which are gelu_tanh's in lm.")
        if read_rope(hf)["position.scaling"] is not None:
            raise ConfigError(f"config.json: {self.name} knows no rope_scaling. Set position.scaling=null.")
        sizes = {"width": hf.get("lru_width") or width, "n_heads": hf["num_attention_heads"], "kernel": hf.get("conv1d_width", 4)}
        scale = torch.tensor(width**0.5, dtype=torch.bfloat16).item()  # transformers keeps it so, whatever the dtype of the model
        recurrent = {"recurrent": {"kind": "rg_lru", **sizes}} if "recurrent" in pattern else {}
        numbers = {"attention.window": hf.get("attention_window_size") or 2048, "head.softcap": hf.get("logits_soft_cap") or 30.0}
        numbers |= {"embed.scale": scale, "ffn.hidden": hf["intermediate_size"] // 2}
        return {**numbers, "pattern": pattern, **recurrent}

    def write(self, ours: Tree) -> Tree:
        there = {"lru_width": ours.get("recurrent.width"), "conv1d_width": ours.get("recurrent.kernel", 4), "block_types": ours["pattern"]}
        return there | {"intermediate_size": 2 * ours["ffn.hidden"]}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for slot in ("attention", "recurrent", "ffn"):
            yield from module(f"{here}.{slot}_residual.norm", f"{there}.{'channel' if slot == 'ffn' else 'temporal'}_pre_norm")
        for name in ("gate", "up", "down"):
            yield from module(f"{here}.ffn.{name}", f"{there}.mlp_block.{name}_proj")
        for name in "qkvo":
            yield from module(f"{here}.attention.{name}", f"{there}.temporal_block.{name}_proj")
        here, there = f"{here}.recurrent", f"{there}.temporal_block"
        for name, theirs in {"x": "linear_x", "gate": "linear_y", "o": "linear_out"}.items():
            yield from module(f"{here}.{name}", f"{there}.{theirs}")
        yield Pair((f"{here}.kernel",), (f"{there}.conv_1d.weight",), Squeeze())
        for name, theirs in {"write": "input_gate", "rate": "recurrent_gate"}.items():
            yield Pair((f"{here}.{name}.weight",), (f"{there}.rg_lru.{theirs}_weight",), Transpose())
            yield same(f"{here}.{name}.bias", f"{there}.rg_lru.{theirs}_bias")
        yield from (same(f"{here}.kernel_bias", f"{there}.conv_1d.bias"), same(f"{here}.fade", f"{there}.rg_lru.recurrent_param"))


FAMILY = RecurrentGemma()
