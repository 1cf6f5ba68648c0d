"""GLM-5.  Z.ai 2026; the attention of DeepSeek-V3.2, arXiv:2512.02556, and layers that share a choice, arXiv:2603.12201."""

from lm.errors import ConfigError
from lm.hf.families.deepseek_v32 import DeepSeekV32
from lm.hf.io.transforms import Same, Transform
from lm.nn.mixers.indexer import owns, spaced
from lm.schema import Tree

_FULL, _SHARED = "full", "shared"


class GLMMoEDSA(DeepSeekV32):
    """DeepSeek-V3.2 whose indexers rotate neighbours, too; some layers may see what the indexer of an earlier one chooses."""

    name = "glm_moe_dsa"
    architecture = "GlmMoeDsaForCausalLM"
    usual_dense = 12288
    fields = {
        **DeepSeekV32.fields,
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.q_rank": ("q_lora_rank", 2048),
        "attention.nope_dim": ("qk_nope_head_dim", 192),
        "attention.v_dim": ("v_head_dim", 256),
        "attention.indexer.n_heads": ("index_n_heads", 32),
        "ffn.router.n_groups": ("n_group", 1),
        "ffn.router.top_groups": ("topk_group", 1),
    }
    further = (*DeepSeekV32.further, "indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")

    def read(self, hf: Tree) -> Tree:
        found = super().read({"qk_nope_head_dim": 192, **hf})
        return found if found["attention.indexer.every"] == 1 else {**found, "mtp": None}

    def indexers(self, hf: Tree) -> Tree:
        """Reads the names of layers, else a letter for each, else how many layers one serves."""
        n, letters = hf["num_hidden_layers"], {"F": _FULL, "S": _SHARED}
        pattern = hf.get("indexer_types") or [letters.get(each, each) for each in hf.get("index_topk_pattern") or ()]
        if not pattern:
            every, first = max(hf.get("index_topk_freq", 1), 1), hf.get("index_skip_topk_offset", 2)
            pattern = [_FULL if max(layer - first + 1, 0) % every == 0 else _SHARED for layer in range(n)]
        found = spaced([each == _FULL for each in pattern]) if {*pattern} <= {_FULL, _SHARED} and len(pattern) == n else None
        if found is None:
            raise ConfigError(f"config.json: {pattern} of {n} layers have indexers of their own, of which lm has the first ones and behind"
                              " them every n-th. Import another model.")  # fmt: skip
        return {"attention.indexer.every": found[0], "attention.indexer.first": found[1]}

    def write(self, ours: Tree) -> Tree:
        every, first = (ours.get(f"attention.indexer.{name}", 1) for name in ("every", "first"))
        types = [_FULL if owns(layer, every, first) else _SHARED for layer in range(ours["n_layers"])]
        return {**super().write(ours), "indexer_types": types}

    def turned(self, ours: Tree) -> Transform:
        return Same()


FAMILY = GLMMoEDSA()
