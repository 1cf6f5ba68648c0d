"""Llama 1 to 3, and what is built like them.  Grattafiori et al. 2024, arXiv:2407.21783."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.io.family import Family, Pair, module, same
from lm.nn.model_config import ModelConfig
from lm.schema import Tree


class Llama(Family):
    """RMSNorm, RoPE, grouped queries, a gated feed-forward."""

    name = "llama"
    architecture = "LlamaForCausalLM"
    prefix = "model."
    theta: ClassVar[float | None] = 10000.0
    usual_rope: ClassVar[Tree] = {}  # rotary parameters of a file that has none, where the class has other than the plain ones
    last_norm: ClassVar[str] = "model.norm"  # name of the norm behind the layers
    ignored: ClassVar[tuple[str, ...]] = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": "max_position_embeddings",
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "norm.eps": ("rms_norm_eps", 1e-6),
        "attention.n_heads": "num_attention_heads",
        "attention.n_kv_heads": ("num_key_value_heads", None),
        "attention.head_dim": ("head_dim", None),
        "attention.qkv_bias": ("attention_bias", False),
        "attention.out_bias": ("attention_bias", False),
        "attention.dropout": ("attention_dropout", 0.0),
        "ffn.hidden": "intermediate_size",
        "ffn.activation": ("hidden_act", "silu"),
        "ffn.bias": ("mlp_bias", False),
        "head.tied": ("tie_word_embeddings", False),
    }
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "attention.kind": "gqa", "ffn.kind": "mlp", "ffn.gated": True,
        "position.kind": "rope", "block.kind": "sequential",
    }  # fmt: skip

    def config(self, hf: Tree) -> ModelConfig:
        told = hf.get("rope_scaling") or hf.get("rope_parameters") or not self.usual_rope
        return super().config(hf if told else {**hf, "rope_parameters": self.usual_rope})

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "model.embed_tokens.weight")
        yield same("head.weight", "lm_head.weight")
        yield from module("norm", self.last_norm)
        for i in range(ours["n_layers"]):
            yield from self.block(f"blocks.{i}", f"model.layers.{i}", ours)

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of one layer."""
        yield from self.norms(here, there)
        for name in "qkvo":
            yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{name}_proj")
        for name in "qk":
            yield from module(f"{here}.attention.{name}_norm", f"{there}.self_attn.{name}_norm")  # Qwen3, OLMo 2
        yield from self.ffn(here, there, ours)
        yield same(f"{here}.attention.sinks", f"{there}.self_attn.sinks")  # gpt-oss, Granite SWA

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        """Yields the pairs of the sublayers' norms."""
        yield from module(f"{here}.attention_residual.norm", f"{there}.input_layernorm")
        yield from module(f"{here}.ffn_residual.norm", f"{there}.post_attention_layernorm")

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of the feed-forward."""
        for name in ("gate", "up", "down"):
            yield from module(f"{here}.ffn.{name}", f"{there}.mlp.{name}_proj")


FAMILY = Llama(even_heads=True)
