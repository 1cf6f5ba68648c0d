"""Qwen3 with experts.  Yang et al. 2025, arXiv:2505.09388."""

from collections.abc import Iterator
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.families.qwen3 import Qwen3
from lm.hf.io.family import Pair, activation, gated, without
from lm.schema import Tree


class Qwen3MoE(Qwen3):
    """Qwen3 with a mixture of experts in all layers, or in every n-th and not in the first ones; a window is in all of them."""

    name = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    fields = {
        **without(Qwen3.fields, "ffn.*"),
        "attention.n_kv_heads": ("num_key_value_heads", 4),
        "attention.head_dim": ("head_dim", None),
        "ffn.expert.hidden": ("moe_intermediate_size", 768),
        "ffn.expert.activation": ("hidden_act", "silu"),
        "ffn.top_k": ("num_experts_per_tok", 8),
        "ffn.every": ("decoder_sparse_step", 1),
        "ffn.router.normalize": ("norm_topk_prob", False),
    }
    further: ClassVar[tuple[str, ...]] = (
        "sliding_window", "use_sliding_window", "max_window_layers", "num_experts", "num_local_experts", "mlp_only_layers",
        "intermediate_size",
    )  # fmt: skip
    respelled: ClassVar[tuple[str, ...]] = ("intermediate_size",)
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "attention.kind": "gqa", "attention.qk_norm": "head", "ffn.kind": "moe",
        "ffn.expert.gated": True, "ffn.router.kind": "softmax", "block.kind": "sequential",
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        every, only, n = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or [], hf["num_hidden_layers"]
        plain = [layer in only or (layer + 1) % every != 0 for layer in range(n)]
        first = next((layer for layer in range(n) if not plain[layer]), n)
        first -= first % every  # those that `every` leaves out by itself
        if plain != [layer < first or (layer + 1) % every != 0 for layer in range(n)]:
            raise ConfigError(f"config.json: mlp_only_layers={only} are not the first ones. lm has no other pattern; import another model.")
        dense: Tree = {"ffn.dense": None}
        if any(plain):
            dense = {"ffn.dense.hidden": hf.get("intermediate_size", 6144), "ffn.dense.activation": activation(hf, "hidden_act", "silu")}
        return {
            "attention.window": hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None,
            "ffn.n_experts": hf.get("num_local_experts", hf.get("num_experts", 128)),
            "ffn.first_dense": first,
            **dense,
        }

    def write(self, ours: Tree) -> Tree:
        """Programs such as MLX ask for intermediate_size even where no layer is dense."""
        window = ours["attention.window"]
        return {
            "num_experts": ours["ffn.n_experts"],
            "num_local_experts": ours["ffn.n_experts"],
            "mlp_only_layers": list(range(ours["ffn.first_dense"])),
            "intermediate_size": ours.get("ffn.dense.hidden") or ours["ffn.expert.hidden"],
            **({"use_sliding_window": True, "sliding_window": window} if window is not None else {}),
        }

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of a dense layer's feed-forward, and those of a layer with experts."""
        yield from gated(f"{here}.ffn", f"{there}.mlp", ours["ffn.n_experts"])


FAMILY = Qwen3MoE()
