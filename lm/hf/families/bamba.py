"""Bamba.  IBM, Princeton, CMU and UIUC 2024, "Bamba: inference-efficient hybrid Mamba2 model"."""

from collections.abc import Iterator

from lm.hf.families.granite_hybrid import GraniteHybrid
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module
from lm.hf.options.mamba import MAMBA, mamba_pairs, read_mamba, write_mamba
from lm.hf.options.pattern import ATTENDS, read_pattern, write_pattern
from lm.hf.options.rope import read_rope, write_rope
from lm.schema import Tree


class Bamba(GraniteHybrid):
    """Llama with Mamba-2 in most layers, and half of each head rotated in those that attend."""

    name = "bamba"
    architecture = "BambaForCausalLM"
    last_norm = "model.final_layernorm"
    theta = 10000.0
    partial = 1.0
    renamed = {}
    fields = {
        **Llama.fields,
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
    }
    further = (
        *(key for key in GraniteHybrid.further if key.startswith(("mamba_", "time_step_"))), "attn_layer_indices", "attn_rotary_emb",
        "num_logits_to_keep", "z_loss_coefficient",
    )  # fmt: skip
    respelled = ("attn_layer_indices", "mamba_d_head", "mamba_n_heads")
    fixed = Llama.fixed

    def read(self, hf: Tree) -> Tree:
        n, attends = hf["num_hidden_layers"], hf.get("attn_layer_indices") or []
        pattern = read_pattern([ATTENDS[0] if layer in attends else MAMBA[0] for layer in range(n)], n, MAMBA)
        rope = read_rope({**hf, "partial_rotary_factor": 0.5})  # transformers looks at that of rope_parameters alone
        return {"pattern": pattern, **rope, **(read_mamba(hf, 1e-5) if "recurrent" in pattern else {})}

    def write(self, ours: Tree) -> Tree:
        attends = [layer for layer, name in enumerate(write_pattern(ours, MAMBA[0])) if name == ATTENDS[0]]
        partial = {"partial_rotary_factor": ours.get("position.fraction")}
        rope = {key: {**given, **partial} for key, given in write_rope(ours).items() if isinstance(given, dict)}  # of either spelling
        return {"attn_layer_indices": attends, **rope, **write_mamba(ours)}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for slot, theirs in {"attention": "input", "recurrent": "input", "ffn": "pre_ff"}.items():
            yield from module(f"{here}.{slot}_residual.norm", f"{there}.{theirs}_layernorm")
        for name in "qkvo":
            yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{name}_proj")
        for name in ("gate", "up", "down"):
            yield from module(f"{here}.ffn.{name}", f"{there}.feed_forward.{name}_proj")
        if "recurrent.n_heads" in ours:
            yield from mamba_pairs(f"{here}.recurrent", f"{there}.mamba", ours)


FAMILY = Bamba()
