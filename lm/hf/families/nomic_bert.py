"""Nomic BERT, and nomic-embed.  Nussbaum et al. 2024, arXiv:2402.01613."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.bert import Bert
from lm.hf.io.family import Pair, module, modules, same
from lm.hf.io.transforms import Split
from lm.nn.model_config import ModelConfig
from lm.schema import Tree


class NomicBert(Bert):
    """BERT with rotary positions and a gated feed-forward, and biases in its norms and before its head alone."""

    name = "nomic_bert"
    architecture = "NomicBertForMaskedLM"
    root: ClassVar[str] = "nomic_bert."  # of the keys of a model without its head
    theta: ClassVar[float | None] = 1000.0
    attention: ClassVar[str] = "attn"
    matrices: ClassVar[dict[str, str]] = {"gate": "fc12", "up": "fc11", "down": "fc2"}  # of the feed-forward
    before: ClassVar[dict[str, str]] = {  # the head
        "head.dense": "cls.predictions.transform.dense", "head.norm": "cls.predictions.transform.layer_norm",
    }  # fmt: skip
    logits: ClassVar[str] = "cls.predictions"  # where the head's bias is
    ignored: ClassVar[tuple[str, ...]] = (r"nomic_bert\.pooler\.dense\.(weight|bias)", r"cls\.predictions\.decoder\.(weight|bias)")
    older_endings = {}
    renamed: ClassVar[dict[str, str]] = {  # of its own files
        "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps", "activation_function": "hidden_act",
        "rotary_emb_base": "rope_theta", "attn_pdrop": "attention_probs_dropout_prob", "resid_pdrop": "hidden_dropout_prob",
    }  # fmt: skip
    fields = {
        **Bert.fields,
        "max_seq_len": ("max_position_embeddings", 2048),
        "attention.head_dim": ("head_dim", None),
        "attention.dropout": ("attention_probs_dropout_prob", 0.0),
        "dropout": ("hidden_dropout_prob", 0.0),
        "ffn.activation": ("hidden_act", "silu"),
    }
    respelled: ClassVar[tuple[str, ...]] = ("hidden_act",)  # swiglu in its own files
    fixed = {
        **Bert.fixed, "position.kind": "rope", "ffn.gated": True, "attention.qkv_bias": False, "attention.out_bias": False,
        "ffn.bias": False,
    }  # fmt: skip
    fixed_there: ClassVar[Tree] = {
        "causal": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "parallel_block": False, "prenorm": False, "qkv_proj_bias": False,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
        "use_rms_norm": False,
    }  # fmt: skip

    def config(self, hf: Tree) -> ModelConfig:
        return super().config(hf | {"hidden_act": "silu"} if hf.get("hidden_act") == "swiglu" else hf)

    def read(self, hf: Tree) -> Tree:
        return super().read({"hidden_act": "silu", **hf})

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", f"{self.root}embeddings.word_embeddings.weight")
        yield same("segment.weight", f"{self.root}embeddings.token_type_embeddings.weight")
        yield from module("embed_norm", f"{self.root}emb_ln")
        yield same("head.bias", f"{self.logits}.bias")
        for mine, theirs in self.before.items():
            yield from module(mine, theirs)
        width = ours["attention.n_heads"] * ours["attention.head_dim"]
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"{self.root}encoder.layers.{i}"
            yield from modules(tuple(f"{here}.attention.{name}" for name in "qkv"), f"{there}.{self.attention}.Wqkv", Split([width] * 3))
            yield from module(f"{here}.attention.o", f"{there}.{self.attention}.out_proj")
            yield from module(f"{here}.attention_residual.norm", f"{there}.norm1")
            yield from module(f"{here}.ffn_residual.norm", f"{there}.norm2")
            for mine, theirs in self.matrices.items():
                yield from module(f"{here}.ffn.{mine}", f"{there}.mlp.{theirs}")


FAMILY = NomicBert()
