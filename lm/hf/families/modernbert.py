"""ModernBERT with its head for masked tokens.  Warner et al. 2024, arXiv:2412.13663."""

from collections.abc import Iterator
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.io.family import Family, Pair, activation, hf_activation, module, modules, same
from lm.hf.io.transforms import Split
from lm.hf.options.windows import layer_types, read_windows, write_windows
from lm.nn.model_config import ModelConfig
from lm.schema import Tree

_ENDS = {"embed_norm": "model.embeddings.norm", "norm": "model.final_norm", "head": "decoder"}
_ALIKE = {"attention_residual.norm": "attn_norm", "attention.o": "attn.Wo", "ffn_residual.norm": "mlp_norm", "ffn.down": "mlp.Wo"}
_BASES = {"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"}
"""Its names for rotary bases, outside of rope_parameters -> those of other families, at which transformers' class does not look."""


class ModernBert(Family):
    """An encoder with rotary positions of two bases, windows in two of three layers, GeGLU, and no norm before the first attention."""

    name = "modernbert"
    architecture = "ModernBertForMaskedLM"
    auto = "AutoModelForMaskedLM"
    theta = 160000.0
    local_theta = 10000.0
    transform: ClassVar[str] = "head"  # name of the dense layer and the norm before the head
    itself: ClassVar[int] = 1  # local_attention has a half to either side of the token, and ours counts the token too
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": ("max_position_embeddings", 8192),
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "norm.eps": ("norm_eps", 1e-5),
        "norm.bias": ("norm_bias", False),
        "attention.n_heads": "num_attention_heads",
        "attention.qkv_bias": ("attention_bias", False),
        "attention.out_bias": ("attention_bias", False),
        "attention.dropout": ("attention_dropout", 0.0),
        "dropout": ("embedding_dropout", 0.0),
        "ffn.hidden": "intermediate_size",
        "ffn.activation": ("hidden_activation", "gelu"),
        "ffn.bias": ("mlp_bias", False),
        "ffn.dropout": ("mlp_dropout", 0.0),
        "head.tied": ("tie_word_embeddings", True),
        "head.bias": ("decoder_bias", True),
        "head.transform_bias": ("classifier_bias", False),
    }
    further = (
        "layer_types", "local_attention", "global_attn_every_n_layers", "classifier_activation", "classifier_pooling", "layer_norm_eps",
        "position_embedding_type", "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad", "sparse_prediction",
        "sparse_pred_ignore_index", "sliding_window", *_BASES,
    )  # fmt: skip
    respelled = ("local_attention", *_BASES)  # half is rounded down; bases in rope_parameters come first
    fixed = {
        "kind": "encoder", "norm.kind": "layer", "norm.place": "pre", "position.kind": "rope", "attention.kind": "gqa", "ffn.kind": "mlp",
        "ffn.gated": True, "block.kind": "sequential", "block.first_norm": False, "embed.norm": True,
    }  # fmt: skip
    fixed_there = {"pad_token_id": None}  # where none is told, transformers takes 50283

    def config(self, hf: Tree) -> ModelConfig:
        return super().config(hf | {usual: hf.get(own) for own, usual in _BASES.items()})

    def read(self, hf: Tree) -> Tree:
        if (hf.get("rope_scaling") or {}).get("rope_type", "default") != "default":
            raise ConfigError("config.json: rope_scaling is of layers with a window too, which are not scaled in lm. Import another model.")
        usual = layer_types(hf["num_hidden_layers"], hf.get("global_attn_every_n_layers", 3), 0)
        windows = {**hf, "sliding_window": self.half(hf) + self.itself}
        return read_windows(windows, usual, None) | {"head.transform": activation(hf, "classifier_activation", "gelu")}

    def half(self, hf: Tree) -> int:
        """Returns how many tokens to either side of it a token sees: transformers' class takes this number first, too."""
        found: int = hf["sliding_window"] if "sliding_window" in hf else hf.get("local_attention", 128) // 2
        return found

    def write(self, ours: Tree) -> Tree:
        windows = write_windows(ours)
        local = {"local_attention": 2 * (windows.pop("sliding_window") - self.itself)} if "sliding_window" in windows else {}
        theta, local_theta = ours["position.theta"], ours.get("position.local_theta")
        bases = {"global_rope_theta": theta, "local_rope_theta": theta if local_theta is None else local_theta}  # of transformers 4
        # transformers would take a `rope_scaling` for layers with a window too
        return {**windows, **local, **bases, "classifier_activation": hf_activation(ours["head.transform"]), "rope_scaling": None}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "model.embeddings.tok_embeddings.weight")
        for mine, theirs in _ENDS.items():
            yield from module(mine, theirs)
        for mine in ("dense", "norm"):
            yield from module(f"head.{mine}", f"{self.transform}.{mine}")
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}", f"model.layers.{i}"
            yield from self.projections(here, there, ours)
            yield from modules((f"{here}.ffn.gate", f"{here}.ffn.up"), f"{there}.mlp.Wi", Split([ours["ffn.hidden"]] * 2))
            for mine, theirs in _ALIKE.items():
                yield from module(f"{here}.{mine}", f"{there}.{theirs}")

    def projections(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of the projections to queries, keys and values."""
        width = ours["attention.n_heads"] * ours["attention.head_dim"]
        yield from modules(tuple(f"{here}.attention.{name}" for name in "qkv"), f"{there}.attn.Wqkv", Split([width] * 3))


FAMILY = ModernBert()
