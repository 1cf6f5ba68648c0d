"""DeepSeek-V3.  arXiv:2412.19437."""

import re
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, activation, gated, module, same
from lm.hf.io.transforms import Copies, SplitHeads
from lm.hf.options.rope import read_rope
from lm.nn.position.scaling import YarnScaling
from lm.schema import Tree, from_tree

LATENT = {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "o": "o_proj"}
QUERY = {"q": "q_proj", "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}
MTP_LAYERS = "num_nextn_predict_layers"


class DeepSeekV3(Llama):
    """Latent attention, and after the first layers a mixture of experts with a correction bias and shared experts.

    Blocks of multi-token prediction are layers after the last one: README_WEIGHTS.md of github.com/deepseek-ai/DeepSeek-V3.
    """

    name = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    fields: ClassVar[dict[str, str | tuple[str, Any]]] = {
        **{ours: theirs for ours, theirs in Llama.fields.items() if not ours.startswith(("attention.", "ffn."))},
        "attention.n_heads": "num_attention_heads",
        "attention.q_rank": ("q_lora_rank", 1536),
        "attention.kv_rank": ("kv_lora_rank", 512),
        "attention.nope_dim": ("qk_nope_head_dim", 128),
        "attention.rope_dim": ("qk_rope_head_dim", 64),
        "attention.v_dim": ("v_head_dim", 128),
        "attention.bias": ("attention_bias", False),
        "attention.dropout": ("attention_dropout", 0.0),
        "ffn.expert.activation": ("hidden_act", "silu"),
        "ffn.expert.hidden": ("moe_intermediate_size", 2048),
        "ffn.n_experts": ("n_routed_experts", 256),
        "ffn.n_shared": ("n_shared_experts", 1),
        "ffn.top_k": ("num_experts_per_tok", 8),
        "ffn.first_dense": ("first_k_dense_replace", 3),
        "ffn.router.n_groups": ("n_group", 8),
        "ffn.router.top_groups": ("topk_group", 4),
        "ffn.router.normalize": ("norm_topk_prob", True),
        "ffn.router.scale": ("routed_scaling_factor", 2.5),
        "position.interleaved": ("rope_interleave", True),
    }
    further: ClassVar[tuple[str, ...]] = ("intermediate_size", "num_key_value_heads", "qk_head_dim", "head_dim", MTP_LAYERS)
    fixed: ClassVar[Tree] = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "attention.kind": "mla", "attention.latent_eps": 1e-6,
        "ffn.kind": "moe", "ffn.expert.gated": True, "ffn.router.kind": "sigmoid", "block.kind": "sequential",
    }  # fmt: skip
    fixed_there: ClassVar[Tree] = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    renamed: ClassVar[dict[str, str]] = {"num_mtp_layers": MTP_LAYERS}

    def as_stored(self, hf: Tree, names: Collection[str]) -> Tree:
        """Counts the multi-token prediction layers in the file: transformers writes their number, and leaves their tensors out."""
        beyond = [re.compile(pattern) for pattern in self._beyond(hf)]
        return {**hf, MTP_LAYERS: sum(any(pattern.fullmatch(name) for name in names) for pattern in beyond)}

    def ignores(self, hf: Tree) -> tuple[str, ...]:
        return (*self.ignored, *self._beyond(hf))

    def _beyond(self, hf: Tree) -> list[str]:
        """Returns for each layer after the last one, which predicts a further token, a pattern of its tensors' names."""
        first, n = hf.get("num_hidden_layers"), hf.get(MTP_LAYERS, 1)
        return [rf"(model\.)?layers\.{first + k}\..*" for k in range(n)] if isinstance(first, int) and isinstance(n, int) else []

    def read(self, hf: Tree) -> Tree:
        if not hf.get("n_shared_experts", 1):
            raise ConfigError("config.json: n_shared_experts=0 has no form in transformers, which wants one or more.")
        self._require_groups(hf)
        if hf.get("n_routed_experts", 256) < 2 * hf.get("n_group", 8):
            raise ConfigError(
                f"config.json: n_group={hf.get('n_group', 8)} leaves fewer than two experts a group, which transformers wants."
            )
        dense: Tree = {"ffn.dense": None}
        if hf.get("first_k_dense_replace", 3):
            dense = {"ffn.dense.hidden": hf.get("intermediate_size", 18432), "ffn.dense.activation": activation(hf, "hidden_act", "silu")}
        mtp: Tree = {"mtp.depth": hf.get(MTP_LAYERS, 1)} if hf.get(MTP_LAYERS, 1) else {"mtp": None}
        return {**dense, **mtp, **self._scale(hf)}

    def _require_groups(self, hf: Tree) -> None:
        if null := next((key for key in ("n_group", "topk_group") if hf.get(key, 1) is None), None):
            raise ConfigError(f"config.json: {null} is null, and transformers computes with a number. Write 1 where there are no groups.")

    def _scale(self, hf: Tree) -> Tree:
        """Returns attention.scale of a model with YaRN, whose scores have a factor of their own; {} for other models."""
        scaling = read_rope(hf)["position.scaling"]
        if scaling is None or scaling["kind"] != "yarn":
            return {}
        width = hf.get("qk_nope_head_dim", 128) + hf.get("qk_rope_head_dim", 64)
        return {"attention.scale": width**-0.5 * from_tree(YarnScaling, scaling, "config.json").score_factor()}

    def write(self, ours: Tree) -> Tree:
        a = {name: ours[f"attention.{name}"] for name in ("n_heads", "nope_dim", "rope_dim")}
        return {
            MTP_LAYERS: ours.get("mtp.depth", 0),
            "num_key_value_heads": a["n_heads"],
            "qk_head_dim": a["nope_dim"] + a["rope_dim"],
            "head_dim": a["rope_dim"],
            **({"intermediate_size": ours["ffn.dense.hidden"]} if ours["ffn.first_dense"] else {}),
        }

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        """Yields all pairs; each layer that predicts a further token has copies of the embedding and the head in the file."""
        further = [f"model.layers.{ours['n_layers'] + k}" for k in range(ours.get("mtp.depth", 0))]
        heads = [f"{there}.shared_head.head.weight" for there in further]
        copies = {"embed.weight": [f"{there}.embed_tokens.weight" for there in further], "head.weight": heads}
        if ours["head.tied"]:
            copies["embed.weight"] += heads
        for pair in super().pairs(ours):
            theirs = (*pair.theirs, *copies.get(pair.ours[0], []))
            yield Pair(pair.ours, theirs, Copies(len(theirs))) if pair.ours[0] in copies else pair
        for k, there in enumerate(further):
            for name, their_name in (("token_norm", "enorm"), ("hidden_norm", "hnorm"), ("join", "eh_proj"), ("norm", "shared_head.norm")):
                yield same(f"mtp.{k}.{name}.weight", f"{there}.{their_name}.weight")
            yield from self.block(f"mtp.{k}.block", there, ours)

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from self.norms(here, there)
        for name, theirs in (LATENT | QUERY).items():
            yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{theirs}")
        up = (f"{here}.attention.k_up.weight", f"{here}.attention.v_up.weight")
        heads = SplitHeads(ours["attention.n_heads"], (ours["attention.nope_dim"], ours["attention.v_dim"]))
        yield Pair(up, (f"{there}.self_attn.kv_b_proj.weight",), heads)
        yield from self.ffn(here, there, ours)

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of a dense layer's feed-forward, and those of a layer with experts."""
        yield from gated(f"{here}.ffn", f"{there}.mlp", ours["ffn.n_experts"])
        yield same(f"{here}.ffn.router.correction_bias", f"{there}.mlp.gate.e_score_correction_bias")
        for name in ("gate", "up", "down"):
            yield same(f"{here}.ffn.shared.{name}.weight", f"{there}.mlp.shared_experts.{name}_proj.weight")


FAMILY = DeepSeekV3()
