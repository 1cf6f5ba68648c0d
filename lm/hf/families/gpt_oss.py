"""gpt-oss.  OpenAI 2025, arXiv:2508.10925."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, same, without
from lm.hf.io.transforms import Alternate, Chain, Transpose
from lm.hf.options.rope import read_rope
from lm.hf.options.windows import WINDOW_KEYS, layer_types, read_windows, write_windows
from lm.schema import Tree

YARN: Tree = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Where the file says nothing of rope."""


class GptOss(Llama):
    """Sinks, a window in every second layer, and experts with biases, stored with gate and up in alternate columns."""

    name = "gpt_oss"
    architecture = "GptOssForCausalLM"
    theta = 150000.0
    fields = {
        **without(Llama.fields, "ffn.*"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "attention.head_dim": ("head_dim", 64),
        "attention.qkv_bias": ("attention_bias", True),
        "attention.out_bias": ("attention_bias", True),
        "ffn.expert.hidden": "intermediate_size",
        "ffn.expert.gpt_oss_limit": ("swiglu_limit", 7.0),
        "ffn.n_experts": ("num_local_experts", 128),
        "ffn.top_k": ("num_experts_per_tok", 4),
    }
    further = WINDOW_KEYS
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "attention.kind": "gqa", "attention.gpt_oss_sinks": True,
        "ffn.kind": "moe", "ffn.expert.gated": True, "ffn.expert.bias": True, "ffn.expert.activation": "quick_gelu",
        "ffn.router.kind": "softmax", "ffn.router.bias": True, "block.kind": "sequential",
    }  # fmt: skip
    fixed_there = {"hidden_act": "silu", "swiglu_alpha": 1.702}

    def read(self, hf: Tree) -> Tree:
        if hf.get("swiglu_limit", 7.0) is None:
            raise ConfigError(f"config.json: swiglu_limit is null, and experts of transformers' {self.name} have one. Write the number.")
        rope = {"rope_parameters": hf.get("rope_parameters") or hf.get("rope_scaling") or YARN}
        return read_rope(hf | rope, self.theta) | read_windows(hf, layer_types(hf["num_hidden_layers"], 2), 128)

    def write(self, ours: Tree) -> Tree:
        """A model without a limit differs by it, in `homeless`, and by what else it has not."""
        unlimited = ours.get("ffn.expert.gpt_oss_limit") is None
        return write_windows(ours) | ({"swiglu_limit": 7.0} if unlimited else {})

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Matrices are (experts, in, out), biases (experts, out)."""
        stacked, theirs = f"{here}.ffn.experts", f"{there}.mlp.experts"
        yield from module(f"{here}.ffn.router", f"{there}.mlp.router")
        yield Pair((f"{stacked}.gate", f"{stacked}.up"), (f"{theirs}.gate_up_proj",), Chain(Alternate(), Transpose()))
        yield Pair((f"{stacked}.gate_bias", f"{stacked}.up_bias"), (f"{theirs}.gate_up_proj_bias",), Alternate())
        yield Pair((f"{stacked}.down",), (f"{theirs}.down_proj",), Transpose())
        yield same(f"{stacked}.down_bias", f"{theirs}.down_proj_bias")


FAMILY = GptOss()
