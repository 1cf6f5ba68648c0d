"""Llama 4, text alone.  Meta 2025, "The Llama 4 herd"."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, activation, same, without
from lm.hf.io.transforms import Chain, Halves, Transpose
from lm.hf.options.windows import FULL
from lm.nn.spacing import evenly, is_there
from lm.schema import Tree

CHUNKED = "chunked_attention"
_RESPELLED = (
    "no_rope_layers", "no_rope_layer_interval", "layer_types", "moe_layers", "interleave_moe_layer_step", "attention_chunk_size",
    "intermediate_size_mlp", "attn_temperature_tuning", "floor_scale", "attn_scale",
)  # fmt: skip


class Llama4(Llama):
    """Llama whose layers that rotate attend within chunks, and in the others, where queries grow with their position, to whole rows; with
    experts in all layers or in every n-th, which read a token times its score, beside one that every token passes.

    Published files hold a model of images and text (model_type llama4); this is what transformers saves of its text model. transformers
    counts padding in front of a row among the positions by which queries grow.
    """

    name = "llama4_text"
    architecture = "Llama4ForCausalLM"
    theta = 500000.0
    fields = {
        **without(Llama.fields, "ffn.*"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "attention.head_dim": ("head_dim", 128),
        "ffn.expert.hidden": ("intermediate_size", 8192),
        "ffn.expert.activation": ("hidden_act", "silu"),
        "ffn.n_experts": ("num_local_experts", 16),
        "ffn.top_k": ("num_experts_per_tok", 1),
    }
    unadapted = ("experts.gate_up_proj", "experts.down_proj")  # which it takes for (e, out, in)
    further = (*_RESPELLED, "use_qk_norm")
    respelled = _RESPELLED
    idle = ("for_llm_compressor", "router_jitter_noise")
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "attention.kind": "gqa", "position.kind": "rope",
        "position.interleaved": True, "ffn.kind": "moe", "ffn.expert.gated": True, "ffn.n_shared": 1, "ffn.weigh_inputs": True,
        "ffn.router.kind": "plain_sigmoid", "ffn.router.normalize": False, "block.kind": "sequential",
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        n = hf["num_hidden_layers"]
        rotates = [bool(one) for one in hf.get("no_rope_layers") or _all_but(n, hf.get("no_rope_layer_interval", 4))]
        every, at = evenly({layer: not one for layer, one in enumerate(rotates)}) or (None, None)
        if rotates != _all_but(n, every, at) or every == 1:
            raise ConfigError(f"config.json: no_rope_layers={hf.get('no_rope_layers')} are not 0 in every n-th layer alone, with n over 1."
                              " lm has no other pattern; import another model.")  # fmt: skip
        return {
            **self._chunks(hf.get("layer_types") or [CHUNKED if one else FULL for one in rotates], n, hf.get("attention_chunk_size", 8192)),
            "attention.qk_norm": "l2" if hf.get("use_qk_norm", True) else "none",
            "attention.query_growth": self._growth(hf) if every is not None and hf.get("attn_temperature_tuning", True) else None,
            "position.none_every": every,
            "position.none_at": at,
            **self._experts(hf, n),
        }

    @staticmethod
    def _chunks(types: list[str], n: int, chunk: int | None) -> Tree:
        """Returns which layers attend within chunks of so many tokens."""
        if types == [FULL] * n:
            return {"attention.window": None, "attention.chunked": False}
        every, at = evenly({layer: kind == FULL for layer, kind in enumerate(types)}) or (None, None)
        if types != [CHUNKED if one else FULL for one in _all_but(n, every, at)] or chunk is None:
            raise ConfigError(f"config.json: layer_types={types} with attention_chunk_size={chunk} are not chunks in all layers but every"
                              " n-th. lm has no other pattern; import another model.")  # fmt: skip
        return {"attention.window": chunk, "attention.chunked": True, "attention.global_every": every, "attention.global_at": at}

    @staticmethod
    def _growth(hf: Tree) -> Tree:
        return {"rate": hf.get("attn_scale", 0.1), "every": hf.get("floor_scale", 8192), "first": 1, "unrotated": True}

    @staticmethod
    def _experts(hf: Tree, n: int) -> Tree:
        """Returns which layers have experts, and what the others have."""
        step, told = hf.get("interleave_moe_layer_step", 1), hf.get("moe_layers")
        layers = list(range(step - 1, n, step)) if told is None else list(told)
        dense = {"hidden": hf.get("intermediate_size_mlp", 16384), "activation": activation(hf, "hidden_act", "silu")}
        for every in dict.fromkeys([step, *range(1, n + 1)]):
            first = layers[0] - layers[0] % every if layers else n
            if layers and layers == _with_experts(n, every, first):
                return {"ffn.every": every, "ffn.first_dense": first, "ffn.dense": dense if first or every > 1 else None}
        raise ConfigError(f"config.json: moe_layers={layers} are not every n-th layer. lm has no other pattern; import another model.")

    def write(self, ours: Tree) -> Tree:
        """Programs ask for intermediate_size_mlp and attention_chunk_size even where no layer reads them."""
        n, every, first = ours["n_layers"], ours["ffn.every"], ours["ffn.first_dense"]
        growth = {key: ours.get(f"attention.query_growth.{key}") for key in ("rate", "every")}
        whole = _all_but(n, ours.get("attention.global_every"), ours.get("attention.global_at"))
        chunk = ours["attention.window"] if ours.get("attention.chunked") else None
        return {
            "no_rope_layers": [int(one) for one in _all_but(n, ours.get("position.none_every"), ours.get("position.none_at"))],
            "layer_types": [CHUNKED if chunk is not None and one else FULL for one in whole],
            "attention_chunk_size": chunk or 8192,
            "use_qk_norm": ours["attention.qk_norm"] == "l2",
            "attn_temperature_tuning": growth["rate"] is not None,
            "attn_scale": growth["rate"] or 0.1,
            "floor_scale": growth["every"] or 8192,
            "moe_layers": _with_experts(n, every, first),
            "interleave_moe_layer_step": every,
            "intermediate_size_mlp": ours.get("ffn.dense.hidden") or 2 * ours["ffn.expert.hidden"],
        }

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of a dense layer's feed-forward, and those of a layer with experts, whose matrices are (e, in, out) there."""
        here, there, halves = f"{here}.ffn", f"{there}.feed_forward", Chain(Transpose(), Halves())
        yield same(f"{here}.router.weight", f"{there}.router.weight")
        yield Pair((f"{here}.experts.gate", f"{here}.experts.up"), (f"{there}.experts.gate_up_proj",), halves)
        yield Pair((f"{here}.experts.down",), (f"{there}.experts.down_proj",), Transpose())
        for name in ("gate", "up", "down"):
            yield same(f"{here}.{name}.weight", f"{there}.{name}_proj.weight")
            yield same(f"{here}.shared.{name}.weight", f"{there}.shared_expert.{name}_proj.weight")


def _all_but(n_layers: int, every: int | None, at: int | None = None) -> list[bool]:
    """Returns for each layer whether it is none of every n-th ones: the last of each n, or the one at place `at`."""
    return [not is_there(layer, every, at) for layer in range(n_layers)]


def _with_experts(n_layers: int, every: int, first: int) -> list[int]:
    """Returns the layers that have experts: each n-th one, from `first` on."""
    return [layer for layer in range(first, n_layers) if (layer + 1) % every == 0]


FAMILY = Llama4()
