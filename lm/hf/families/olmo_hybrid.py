"""OLMo Hybrid.  Ai2 2026, "Olmo Hybrid: from theory to practice and back"."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.olmo2 import OLMo2
from lm.hf.io.family import Pair, module, without
from lm.hf.io.transforms import Chain, Join, Squeeze
from lm.hf.options.delta import DELTA, LINEAR, state, widths
from lm.hf.options.pattern import ATTENDS, read_pattern, write_pattern
from lm.hf.options.rope import ROPE_KEYS, read_rope, write_rope
from lm.schema import Tree

_DELTA = {**DELTA, "negative": "linear_allow_neg_eigval"}
_UNROTATED = {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": None}}


class OLMoHybrid(OLMo2):
    """OLMo 2 with the gated delta rule in most layers, whose norms are before the sublayers; published ones have no positions."""

    name = "olmo_hybrid"
    architecture = "OlmoHybridForCausalLM"
    recurrent_kind = "gated_delta"
    theta = None  # `read` asks whether there are positions
    older_endings = {"post_attention_layernorm.weight": "feedforward_layer_norm.weight"}  # in its own files
    built = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    fields = {**without(OLMo2.fields, "attention.head_dim"), "norm.eps": ("rms_norm_eps", 1e-6)}
    further = (
        "layer_types", *_DELTA.values(), *ROPE_KEYS, "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max",
        "linear_dt_init_floor",
    )  # fmt: skip
    respelled = ("layer_types", *_DELTA.values())  # null has a meaning
    fixed = {
        **without(OLMo2.fixed, "position.kind"), "recurrent.kind": "gated_delta",
        "recurrent.eps": 1e-5, "block.recurrent_place": "pre",
    }  # fmt: skip
    fixed_there = {"pad_token_id": None}  # where none is told, transformers takes 100277

    def read(self, hf: Tree) -> Tree:
        n, heads = hf["num_hidden_layers"], hf["num_attention_heads"]
        types = hf.get("layer_types") or [LINEAR if (i + 1) % min(4, n) else ATTENDS[0] for i in range(n)]
        if len(set(pattern := read_pattern(types, n, (LINEAR,)))) < 2:
            raise ConfigError(f"config.json: layers have {pattern[0]} alone, and {self.name} needs both kinds. Use another family.")
        if (act := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ConfigError(f"config.json: hidden_act={act!r} is of the convolutions too, which are silu's in lm. Import another model.")
        values, keys = (hf.get(_DELTA[name]) or heads for name in ("n_heads", "n_k_heads"))
        k_dim = hf.get(_DELTA["k_dim"]) or int(0.75 * hf["hidden_size"] / keys)
        delta = {
            "n_heads": values, "n_k_heads": None if keys == values else keys, "k_dim": k_dim, "v_dim": hf.get(_DELTA["v_dim"]) or 2 * k_dim,
            "kernel": hf.get(_DELTA["kernel"], 4), "negative": hf.get(_DELTA["negative"], True),
        }  # fmt: skip
        rotates = {"rope_theta": 10000.0, **hf, **(hf.get("rope_parameters") or hf.get("rope_scaling") or {})}["rope_theta"] is not None
        position = read_rope(hf) if rotates else {"position.kind": "none"}
        return {"pattern": pattern, **position, **{f"recurrent.{name}": value for name, value in delta.items()}}

    def write(self, ours: Tree) -> Tree:
        delta = {key: ours.get(f"recurrent.{name}") for name, key in _DELTA.items()}
        rope = write_rope(ours) if ours["position.kind"] == "rope" else _UNROTATED
        return {"layer_types": write_pattern(ours, LINEAR), **delta, **rope}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        pattern = ours["pattern"]
        if pattern[int(here.rpartition(".")[2]) % len(pattern)] == "attention":
            yield from super().block(here, there, ours)
            return
        yield from module(f"{here}.recurrent_residual.norm", f"{there}.attention_layer_norm")
        yield from module(f"{here}.ffn_residual.norm", f"{there}.feedforward_layer_norm")
        yield from self.ffn(here, there, ours)
        here, there, qkv = f"{here}.recurrent", f"{there}.linear_attn", Join(widths(ours))
        yield Pair((f"{here}.qkv.weight",), tuple(f"{there}.{name}_proj.weight" for name in "qkv"), qkv)
        yield Pair((f"{here}.kernel",), tuple(f"{there}.{name}_conv1d.weight" for name in "qkv"), Chain(qkv, Squeeze()))
        for name, theirs in {"gate": "g_proj", "beta": "b_proj", "rate": "a_proj", "o": "o_proj"}.items():
            yield from module(f"{here}.{name}", f"{there}.{theirs}")
        yield from state(here, there, "o_norm")


FAMILY = OLMoHybrid()
