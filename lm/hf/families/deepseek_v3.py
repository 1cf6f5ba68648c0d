"""DeepSeek-V3.  arXiv:2412.19437."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.deepseek_moe import FurtherTokens
from lm.hf.io.family import Pair, module, without
from lm.hf.io.transforms import SplitHeads
from lm.hf.options.rope import read_rope
from lm.nn.position.scaling import YarnScaling
from lm.schema import Tree, from_tree

LATENT = {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "o": "o_proj"}
QUERY = {"q": "q_proj", "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}


class DeepSeekV3(FurtherTokens):
    """Latent attention, and the mixture of experts and further tokens of its report."""

    name = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    usual_dense = 18432
    fields = {
        **without(FurtherTokens.fields, "attention.*"),
        "attention.n_heads": "num_attention_heads",
        "attention.q_rank": ("q_lora_rank", 1536),
        "attention.kv_rank": ("kv_lora_rank", 512),
        "attention.nope_dim": ("qk_nope_head_dim", 128),
        "attention.rope_dim": ("qk_rope_head_dim", 64),
        "attention.v_dim": ("v_head_dim", 128),
        "attention.bias": ("attention_bias", False),
        "attention.dropout": ("attention_dropout", 0.0),
        "ffn.expert.hidden": ("moe_intermediate_size", 2048),
        "ffn.n_experts": ("n_routed_experts", 256),
        "ffn.first_dense": ("first_k_dense_replace", 3),
        "ffn.router.n_groups": ("n_group", 8),
        "ffn.router.top_groups": ("topk_group", 4),
        "ffn.router.scale": ("routed_scaling_factor", 2.5),
        "position.interleaved": ("rope_interleave", True),
    }
    further: ClassVar[tuple[str, ...]] = (*FurtherTokens.further, "num_key_value_heads", "qk_head_dim", "head_dim")
    fixed = {**FurtherTokens.fixed, "attention.kind": "mla", "attention.latent_eps": 1e-6}

    def read(self, hf: Tree) -> Tree:
        return {**super().read(hf), **self._scale(hf)}

    def _scale(self, hf: Tree) -> Tree:
        """Returns attention.scale of a model with YaRN, whose scores have a factor of their own; {} for other models."""
        scaling = read_rope(hf)["position.scaling"]
        if scaling is None or scaling["kind"] != "yarn":
            return {}
        width = hf.get("qk_nope_head_dim", 128) + hf.get("qk_rope_head_dim", 64)
        return {"attention.scale": width**-0.5 * from_tree(YarnScaling, scaling, "config.json").score_factor()}

    def write(self, ours: Tree) -> Tree:
        return {**super().write(ours), **self.widths(ours)}

    def widths(self, ours: Tree) -> Tree:
        """Returns the keys of config.json that follow from others."""
        a = {name: ours[f"attention.{name}"] for name in ("n_heads", "nope_dim", "rope_dim")}
        return {"num_key_value_heads": a["n_heads"], "qk_head_dim": a["nope_dim"] + a["rope_dim"], "head_dim": a["rope_dim"]}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from self.norms(here, there)
        for name, theirs in (LATENT | QUERY).items():
            yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{theirs}")
        up = (f"{here}.attention.k_up.weight", f"{here}.attention.v_up.weight")
        heads = SplitHeads(ours["attention.n_heads"], (ours["attention.nope_dim"], ours["attention.v_dim"]))
        yield Pair(up, (f"{there}.self_attn.kv_b_proj.weight",), heads)
        yield from self.ffn(here, there, ours)


FAMILY = DeepSeekV3()
