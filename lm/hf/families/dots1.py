"""dots.llm1.  rednote-hilab 2025, arXiv:2506.05767."""

from lm.errors import ConfigError
from lm.hf.families.deepseek_moe import DeepSeekMoE
from lm.hf.families.qwen3 import Qwen3
from lm.hf.options.windows import WINDOW_KEYS, write_windows
from lm.schema import Tree


class Dots1(DeepSeekMoE, Qwen3):
    """Qwen3's attention, windows included, and DeepSeek-V3's experts."""

    name = "dots1"
    architecture = "Dots1ForCausalLM"
    rare = True
    usual_dense = 10944
    fields = {
        **DeepSeekMoE.fields,
        "attention.n_kv_heads": ("num_key_value_heads", 32),
        "ffn.n_experts": "n_routed_experts",
        "ffn.n_shared": "n_shared_experts",
        "ffn.top_k": "num_experts_per_tok",
        "ffn.first_dense": ("first_k_dense_replace", 0),
        "ffn.router.normalize": ("norm_topk_prob", False),
    }
    further = (*DeepSeekMoE.further, *WINDOW_KEYS, "max_window_layers")
    respelled = ("scoring_func",)
    fixed = {**DeepSeekMoE.fixed, "attention.qk_norm": "head"}

    def read(self, hf: Tree) -> Tree:
        if (scored := hf.get("scoring_func", _SCORES[0])) not in _SCORES:
            raise ConfigError(f"config.json: scoring_func={scored!r} is not known. Known are {' and '.join(_SCORES)}, which mean the same.")
        return {**super().read(hf), **Qwen3.read(self, {"max_window_layers": 62, **hf, "use_sliding_window": True})}

    def write(self, ours: Tree) -> Tree:
        return {**super().write(ours), **write_windows(ours)}


_SCORES = ("noaux_tc", "sigmoid")
FAMILY = Dots1()
