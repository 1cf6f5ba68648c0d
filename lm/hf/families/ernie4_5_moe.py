"""ERNIE 4.5 with experts.  Baidu 2025, "ERNIE 4.5 Technical Report"."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.deepseek_moe import MTP_LAYERS
from lm.hf.families.ernie4_5 import Ernie45
from lm.hf.io.family import Pair, activation, gated, same, without
from lm.hf.io.transforms import Row
from lm.schema import Tree


class Ernie45MoE(Ernie45):
    """ERNIE 4.5 without biases, and after the first layers experts of a softmax with a correction bias, beside shared ones.

    transformers keeps routers in float32 beside bf16 matrices; here they are bf16 too, all but the correction bias.
    """

    name = "ernie4_5_moe"
    architecture = "Ernie4_5_MoeForCausalLM"
    ignored = (*Ernie45.ignored, r"(model\.)?mtp_.*")
    renamed = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    fields = {
        **without(Ernie45.fields, "ffn.*", "*bias"),
        "attention.n_kv_heads": ("num_key_value_heads", 4),
        "attention.head_dim": ("head_dim", None),
        "ffn.expert.hidden": ("moe_intermediate_size", 1536),
        "ffn.expert.activation": ("hidden_act", "silu"),
        "ffn.n_experts": ("moe_num_experts", 64),
        "ffn.n_shared": ("moe_num_shared_experts", 2),
        "ffn.top_k": ("moe_k", 6),
        "ffn.first_dense": ("moe_layer_start_index", 1),
        "ffn.every": ("moe_layer_interval", 1),
    }
    further = ("intermediate_size", "moe_layer_end_index", MTP_LAYERS)
    respelled = ("moe_layer_end_index",)
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "attention.kind": "gqa", "position.kind": "rope",
        "position.interleaved": True, "ffn.kind": "moe", "ffn.expert.gated": True, "ffn.router.kind": "corrected_softmax",
        "block.kind": "sequential",
    }  # fmt: skip
    fixed_there = {"use_bias": False, "moe_norm_min": 1e-12}

    def read(self, hf: Tree) -> Tree:
        n, end = hf["num_hidden_layers"], hf.get("moe_layer_end_index", -1)
        first, every = hf.get("moe_layer_start_index", 1), hf.get("moe_layer_interval", 1)
        if end != -1 and any(layer > end and layer >= first and (layer + 1) % every == 0 for layer in range(n)):
            raise ConfigError(f"config.json: moe_layer_end_index={end} leaves dense layers at the end, where lm has none. Import another.")
        if not first and every == 1:
            return {"ffn.dense": None}
        hidden = hf.get("intermediate_size", 12288)
        return {"ffn.dense.hidden": hidden, "ffn.dense.activation": activation(hf, "hidden_act", "silu")}

    def write(self, ours: Tree) -> Tree:
        dense = ours.get("ffn.dense.hidden")
        return {"moe_layer_end_index": ours["n_layers"] - 1, **({} if dense is None else {"intermediate_size": dense})}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of a dense layer's feed-forward, and those of a layer with experts."""
        yield from gated(f"{here}.ffn", f"{there}.mlp", ours["ffn.n_experts"])
        yield Pair((f"{here}.ffn.router.correction_bias",), (f"{there}.mlp.moe_statics.e_score_correction_bias",), Row())
        for name in ("gate", "up", "down"):
            yield same(f"{here}.ffn.shared.{name}.weight", f"{there}.mlp.shared_experts.{name}_proj.weight")


FAMILY = Ernie45MoE()
