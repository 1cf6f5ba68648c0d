"""Gemma 4, the text model.  Google 2026."""

import math
from collections.abc import Iterator
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.families.gemma2 import Gemma2
from lm.hf.families.gemma3 import Gemma3
from lm.hf.io.family import Pair, activation, hf_activation, module, same, without
from lm.hf.io.transforms import Halves
from lm.hf.options.windows import FULL, SLIDING, WINDOW_KEYS, layer_types, read_windows, write_windows
from lm.nn.ffn.mlp import Activation
from lm.schema import Tree

_GLOBAL = {"head_dim": "global_head_dim", "n_kv_heads": "num_global_key_value_heads"}
_EXPERTS = {"n_experts": "num_experts", "top_k": "top_k_experts", "expert.hidden": "moe_intermediate_size"}
_THEIRS = {"head_dim": "head_dim", "n_kv_heads": "num_key_value_heads"}

KEYS = (
    *WINDOW_KEYS, *_GLOBAL.values(), "per_layer_config", "attention_k_eq_v", "use_double_wide_mlp", "use_bidirectional_attention",
    "intermediate_size", "hidden_activation",
)  # fmt: skip


class Gemma4(Gemma2):
    """Gemma 3 with norms on values; without a window, other heads, whose keys may be their values; layers that read an earlier one's keys;
    and a vector of each token for each layer."""

    name = "gemma4_text"
    architecture = "Gemma4ForCausalLM"
    theta = 1000000.0
    local_theta = 10000.0
    older_ropes = False
    usual_rope = {
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    }
    pattern = 6
    window: ClassVar[int] = 512
    channels: ClassVar[int] = 256  # of layers' vectors, where the file says nothing; 0: the class has neither these nor experts
    unadapted = ("experts.gate_up_proj", "experts.down_proj")  # parameters, not modules
    fields = {
        **without(Gemma3.fields, "ffn.*"),
        "attention.n_kv_heads": ("num_key_value_heads", 4),
        "attention.shared_layers": ("num_kv_shared_layers", 0),
    }
    further = (*KEYS, "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", *_EXPERTS.values())
    respelled = (
        "layer_types", *_GLOBAL.values(), *_THEIRS.values(), "use_double_wide_mlp", "vocab_size_per_layer_input",
        "use_bidirectional_attention",
    )  # fmt: skip
    fixed = {
        **without(Gemma3.fixed, "norm.zero_centered", "ffn.*"),
        "attention.value_norm": True, "attention.scale": 1.0, "block.stream_gain": True,
    }  # fmt: skip
    fixed_there = {"use_bidirectional_attention": None}

    def read(self, hf: Tree) -> Tree:
        if (both := hf.get("use_bidirectional_attention")) not in (None, False, "vision"):  # of images, where there are some
            raise ConfigError(f"config.json: use_bidirectional_attention={both!r} lets tokens see later ones. Import another model.")
        n, shared = hf["num_hidden_layers"], hf.get("num_kv_shared_layers", 0)
        types = [*(hf.get("layer_types") or layer_types(n, self.pattern))]
        types[-1:] = [FULL]  # as transformers does
        windows = read_windows({**hf, "layer_types": types}, types, self.window)
        others = self._heads(hf, types)
        heads = {"attention.global_heads": others} if SLIDING in types else {f"attention.{key}": each for key, each in others.items()}
        channels, vocabulary = hf.get("hidden_size_per_layer_input", self.channels), hf.get("vocab_size_per_layer_input", 262144)
        if shared and self.channels and not channels:
            raise ConfigError(
                f"config.json: num_kv_shared_layers={shared} with hidden_size_per_layer_input=0 is what transformers' class cannot compute."
                " Restore the file."
            )
        if channels and vocabulary != hf["vocab_size"]:
            raise ConfigError(
                f"config.json: vocab_size_per_layer_input={vocabulary} is not vocab_size={hf['vocab_size']}, and in lm layers have a vector"
                " for every token. Import another model."
            )
        act = activation(hf, "hidden_activation", "gelu_pytorch_tanh")
        return {
            **windows,
            **heads,
            "embed.scale": math.sqrt(hf["hidden_size"]),
            "embed.per_layer": {"channels": channels, "activation": act} if channels else None,
            "ffn": self._ffn(hf, act),
        }

    def _ffn(self, hf: Tree, act: Activation) -> Tree:
        """Returns our options of the feed-forward."""
        shared = hf.get("num_kv_shared_layers", 0)
        mlp: Tree = {"kind": "mlp", "gated": True, "hidden": hf["intermediate_size"], "activation": act}
        if shared and hf.get("use_double_wide_mlp", False):
            mlp["last"] = {"n": shared, "hidden": 2 * hf["intermediate_size"]}
        if not hf.get("enable_moe_block", False):
            return mlp
        sizes = {ours: hf[theirs] for ours, theirs in _EXPERTS.items()}
        eps = hf.get("rms_norm_eps", 1e-6)
        expert = {"gated": True, "activation": act, "hidden": sizes.pop("expert.hidden")}
        norms = {"norms": {"kind": "rms", "eps": eps}, "router": {"kind": "normed_softmax", "eps": eps}}
        return {"kind": "beside", "mlp": mlp, "expert": expert, **norms, **sizes}

    def _heads(self, hf: Tree, types: list[str]) -> Tree:
        """Returns the heads of layers without a window, by our options."""
        keys = hf.get("attention_k_eq_v", False)
        found = {ours: hf.get(theirs, usual) for (ours, theirs), usual in zip(_GLOBAL.items(), (512, None), strict=True)}
        if not keys:
            found["n_kv_heads"] = None
        if "per_layer_config" in hf:  # then transformers looks at nothing else
            told = {int(layer): each for layer, each in (hf["per_layer_config"] or {}).items() if each}
            whole = [layer for layer, kind in enumerate(types) if kind == FULL]
            first = told.get(whole[0], {})
            if told != (dict.fromkeys(whole, first) if first else {}) or not {*first} <= {*_THEIRS.values()}:
                raise ConfigError(
                    f"config.json: per_layer_config={hf['per_layer_config']} is not of heads that all layers without a window share."
                    " Import another model."
                )
            found = {ours: first.get(theirs) for ours, theirs in _THEIRS.items()}
        usual = {"head_dim": hf.get("head_dim", 256), "n_kv_heads": hf.get("num_key_value_heads", 4)}
        return {ours: value or usual[ours] for ours, value in found.items()} | {"values": "keys" if keys else "own"}

    def write(self, ours: Tree) -> Tree:
        dense, shared = "ffn" if ours["ffn.kind"] == "mlp" else "ffn.mlp", ours.get("attention.shared_layers")
        hidden, last = ours.get(f"{dense}.hidden", 0), (ours.get("ffn.last.n"), ours.get("ffn.last.hidden"))
        there = {key: ours.get(f"attention.global_heads.{key}") or ours.get(f"attention.{key}") for key in (*_GLOBAL, "values")}
        return {
            **write_windows(ours),
            **{theirs: there[key] for key, theirs in _GLOBAL.items()},
            "attention_k_eq_v": there["values"] == "keys",
            "intermediate_size": hidden,
            "hidden_activation": hf_activation(ours.get(f"{dense}.activation")),
            "use_double_wide_mlp": last == (shared, 2 * hidden),
            **(self._write_others(ours) if self.channels else {}),
        }

    def _write_others(self, ours: Tree) -> Tree:
        """Returns the keys of experts and of layers' vectors."""
        return {
            "enable_moe_block": ours["ffn.kind"] == "beside",
            **{theirs: ours.get(f"ffn.{key}") for key, theirs in _EXPERTS.items()},
            "hidden_size_per_layer_input": ours.get("embed.per_layer.channels") or 0,
            "vocab_size_per_layer_input": ours["vocab_size"],
        }

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield from super().pairs(ours)
        yield same("per_layer.rows.table.weight", "model.embed_tokens_per_layer.weight")
        yield same("per_layer.projection.weight", "model.per_layer_model_projection.weight")
        yield from module("per_layer.norm", "model.per_layer_projection_norm")

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from super().block(here, there, ours)
        yield same(f"{here}.gain", f"{there}.layer_scalar")
        for name, theirs in (("gate", "input_gate"), ("out", "projection")):
            yield same(f"{here}.read.{name}.weight", f"{there}.per_layer_{theirs}.weight")
        yield from module(f"{here}.read.norm", f"{there}.post_per_layer_input_norm")

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        if ours["ffn.kind"] != "beside":
            yield from super().ffn(here, there, ours)
            return
        ffn = f"{here}.ffn"
        for name in ("gate", "up", "down"):
            yield same(f"{ffn}.mlp.{name}.weight", f"{there}.mlp.{name}_proj.weight")
        for name, theirs in (("weight", "proj.weight"), ("gain", "scale"), ("expert_gain", "per_expert_scale")):
            yield same(f"{ffn}.router.{name}", f"{there}.router.{theirs}")
        yield Pair((f"{ffn}.experts.gate", f"{ffn}.experts.up"), (f"{there}.experts.gate_up_proj",), Halves())
        yield same(f"{ffn}.experts.down", f"{there}.experts.down_proj")
        for name, before, behind in (("mlp", "", "_1"), ("experts", "_2", "_2")):
            yield from module(f"{ffn}.{name}_norm", f"{there}.pre_feedforward_layernorm{before}")
            yield from module(f"{ffn}.{name}_norm_out", f"{there}.post_feedforward_layernorm{behind}")


FAMILY = Gemma4()
