"""LFM3.  Liquid AI 2026, "LFM3-1.7B"."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.lfm2 import LFM2
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, without
from lm.hf.options.pattern import read_pattern, write_pattern
from lm.hf.options.windows import FULL, SLIDING, WINDOW_KEYS, read_windows, write_windows
from lm.nn.model_config import ModelConfig
from lm.schema import Tree

_CONV = "conv"
_USUAL: Tree = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}


class LFM3(LFM2):
    """LFM2 with norms behind the sublayers too, a gate for each head, a window in every second layer that attends, and half of the pairs
    turning in the others."""

    name = "lfm3"
    architecture = "Lfm3ForCausalLM"
    local_theta = 10000.0
    older_ropes = False
    renamed = {}
    built = {".self_attn.gate_proj.": ".self_attn.g_proj."}
    fields = {
        **LFM2.fields,
        "attention.n_kv_heads": ("num_key_value_heads", 4),
        "attention.head_dim": ("head_dim", 128),
        "attention.dropout": ("attention_dropout", 0.0),
        **dict.fromkeys(("attention.qkv_bias", "attention.out_bias"), ("attention_bias", False)),
    }
    further = (*WINDOW_KEYS, "conv_L_cache", "use_sandwich_norm", "use_attention_gate")
    respelled = ("layer_types",)
    fixed = without(LFM2.fixed, "norm.place")
    fixed_there = {**LFM2.fixed_there, "pad_token_id": None}  # where none is told, transformers takes 124893

    def config(self, hf: Tree) -> ModelConfig:
        """As `Family.config`; each kind of layer without a base has that of the whole file."""
        if hf.get("rope_scaling"):
            raise ConfigError("config.json: rope_scaling stands for rope_parameters in lfm3. Move it there, by type of layer.")
        ropes: Tree = hf.get("rope_parameters") or _USUAL
        base = {"rope_theta": hf.get("rope_theta", self.theta)}
        told = {kind: base | rope if kind in (FULL, SLIDING) and isinstance(rope, dict) else rope for kind, rope in ropes.items()}
        return super().config({**hf, "rope_parameters": told})

    def read(self, hf: Tree) -> Tree:
        n, gated = hf["num_hidden_layers"], hf.get("use_attention_gate", True)
        usual = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 < i else _CONV for i in range(n)]
        types = hf.get("layer_types") or usual
        if gated and hf.get("attention_bias", False):
            raise ConfigError(
                "config.json: attention_bias=True is not of the gate here, and of all of attention in lm. Import another model."
            )
        pattern = read_pattern([FULL if kind == SLIDING else kind for kind in types], n, (_CONV,))
        return {
            "pattern": pattern,
            "norm.place": "sandwich" if hf.get("use_sandwich_norm", True) else "pre",
            "attention.out_gate": "head" if gated else "none",
            **read_windows(hf, usual, 256, others=(_CONV,)),
            **({"recurrent": {"kind": "short_conv", "kernel": hf.get("conv_L_cache", 7)}} if "recurrent" in pattern else {}),
        }

    def write(self, ours: Tree) -> Tree:
        windows = write_windows(ours)
        mixers = zip(write_pattern(ours, _CONV), windows["layer_types"], strict=True)
        return {
            **windows,
            "layer_types": [kind if mixer == FULL else mixer for mixer, kind in mixers],
            "conv_L_cache": ours.get("recurrent.kernel", 7),
            "use_sandwich_norm": ours["norm.place"] == "sandwich",
            "use_attention_gate": ours["attention.out_gate"] == "head",
        }

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for pair in super().block(here, there, ours):
            if not pair.theirs[0].startswith(f"{there}.self_attn."):
                yield pair
        for pair in Llama.block(self, here, there, ours):
            if pair.theirs[0].startswith(f"{there}.self_attn."):
                yield pair
        yield from module(f"{here}.attention.gate", f"{there}.self_attn.gate_proj")
        for slot in ("attention", "recurrent"):
            yield from module(f"{here}.{slot}_residual.norm_out", f"{there}.post_operator_norm")
        yield from module(f"{here}.ffn_residual.norm_out", f"{there}.post_ffn_norm")


FAMILY = LFM3()
