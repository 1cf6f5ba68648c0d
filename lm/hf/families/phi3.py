"""Phi-3 and Phi-4-mini.  arXiv:2404.14219; 2503.01743."""

from collections.abc import Iterator
from typing import Any

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, modules, without
from lm.hf.io.transforms import Split
from lm.hf.options.rope import read_rope, write_rope
from lm.nn.model_config import ModelConfig
from lm.schema import Tree


class Phi3(Llama):
    """Mistral with q, k and v stored as one, and gate and up. LongRoPE's list is chosen by max_seq_len, once, where transformers looks at
    each input: the two agree on inputs beyond the original length, and on all where max_seq_len does not exceed it."""

    name = "phi3"
    architecture = "Phi3ForCausalLM"
    partial = 1.0
    fields = {
        **without(Llama.fields, "*bias", "*head_dim"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.window": ("sliding_window", None),
        "dropout": ("resid_pdrop", 0.0),
    }
    fixed_there = {"pad_token_id": None}  # where none is told, transformers takes 32000, which smaller vocabularies lack

    def config(self, hf: Tree) -> ModelConfig:
        """As `Family.config`; transformers' class has an original length of its own, and calls longrope yarn too."""
        ropes = {key: hf[key] for key in ("rope_scaling", "rope_parameters") if isinstance(hf.get(key), dict) and "long_factor" in hf[key]}
        longrope = {key: {**rope, "rope_type": "longrope"} for key, rope in ropes.items() if _kind(rope) == "yarn"}
        return super().config({"original_max_position_embeddings": 4096, **hf, **longrope})

    def read(self, hf: Tree) -> Tree:
        scaling = read_rope(hf)["position.scaling"]
        if scaling is not None and scaling["kind"] != "longrope":
            raise ConfigError(f"config.json: rope_type={scaling['kind']!r} is not one that phi3 has. Use longrope, or none.")
        return {}

    def write(self, ours: Tree) -> Tree:
        there = write_rope(ours)
        beside = ("rope_type", "original_max_position_embeddings")  # transformers 4 wants type and the two lists, and nothing else
        if there["rope_scaling"] is not None:
            there["rope_scaling"] = {key: value for key, value in there["rope_scaling"].items() if key not in beside}
        return there | {"embd_pdrop": ours["dropout"]}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        q, kv = (ours[f"attention.{heads}"] * ours["attention.head_dim"] for heads in ("n_heads", "n_kv_heads"))
        yield from self.norms(here, there)
        yield from modules(tuple(f"{here}.attention.{name}" for name in "qkv"), f"{there}.self_attn.qkv_proj", Split([q, kv, kv]))
        yield from module(f"{here}.attention.o", f"{there}.self_attn.o_proj")
        yield from modules((f"{here}.ffn.gate", f"{here}.ffn.up"), f"{there}.mlp.gate_up_proj", Split([ours["ffn.hidden"]] * 2))
        yield from module(f"{here}.ffn.down", f"{there}.mlp.down_proj")


def _kind(rope: Tree) -> Any:
    return rope.get("rope_type", rope.get("type"))


FAMILY = Phi3()
