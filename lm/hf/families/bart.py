"""BART.  Lewis et al. 2019, arXiv:1910.13461."""

import math
from collections.abc import Iterator
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.io.family import Family, Pair, embedding, module, same
from lm.hf.io.transforms import Row, SkipRows
from lm.schema import Tree


class Bart(Family):
    """Norms after the sublayers and the embedding, learned positions whose table starts with two unused rows, a bias on the logits."""

    name = "bart"
    architecture = "BartForConditionalGeneration"
    auto = "AutoModelForSeq2SeqLM"
    prefix = "model."
    ignored: ClassVar[tuple[str, ...]] = (r"(model\.)?(encoder|decoder)\.(embed_tokens\.weight|version)",)
    zero_if_missing: ClassVar[tuple[str, ...]] = ("final_logits_bias",)
    scaled: ClassVar[bool] = False  # the embedding, where config.json does not say
    needs_start: ClassVar[bool] = False  # transformers' class takes no null for the decoder's first token
    unused: ClassVar[int] = 2  # first rows of the table of positions
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": ("max_position_embeddings", 1024),
        "d_model": "d_model",
        "n_encoder_layers": ("encoder_layers", 12),
        "n_layers": ("decoder_layers", 12),
        "attention.n_heads": ("encoder_attention_heads", 16),
        "attention.dropout": ("attention_dropout", 0.0),
        "ffn.hidden": ("encoder_ffn_dim", 4096),
        "ffn.activation": ("activation_function", "gelu"),
        "ffn.dropout": ("activation_dropout", 0.0),
        "dropout": ("dropout", 0.1),
        "head.tied": ("tie_word_embeddings", True),
        "start_token": ("decoder_start_token_id", 2),
    }
    further: ClassVar[tuple[str, ...]] = ("scale_embedding", "decoder_attention_heads", "decoder_ffn_dim", "num_hidden_layers")
    fixed = {
        "kind": "encoder_decoder", "norm.kind": "layer", "norm.place": "post", "norm.eps": 1e-5, "position.kind": "learned",
        "attention.kind": "gqa", "attention.qkv_bias": True, "attention.out_bias": True, "ffn.kind": "mlp", "ffn.gated": False,
        "ffn.bias": True, "block.kind": "sequential", "embed.norm": True, "head.bias": True,
    }  # fmt: skip
    fixed_there = {
        "is_encoder_decoder": True, "normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False,
        "static_position_embeddings": False,
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        if self.needs_start and hf.get("decoder_start_token_id", 0) is None:
            raise ConfigError(f"config.json: decoder_start_token_id is null, and {self.name} needs it. Name it, or set model.start_token.")
        for option, name in (("attention.n_heads", "attention_heads"), ("ffn.hidden", "ffn_dim")):
            usual = self.fields[option][1]
            if hf.get(f"encoder_{name}", usual) != hf.get(f"decoder_{name}", usual):
                said = f"decoder_{name}={hf.get(f'decoder_{name}', usual)} is not that of the encoder, and has no place"
                raise ConfigError(f"config.json: {said} in lm, whose stacks are alike. Import another model.")
        return {"embed.scale": math.sqrt(hf["d_model"]) if hf.get("scale_embedding", self.scaled) else 1.0}

    def write(self, ours: Tree) -> Tree:
        return {
            "scale_embedding": ours["embed.scale"] != 1.0,
            "decoder_attention_heads": ours["attention.n_heads"],
            "decoder_ffn_dim": ours["ffn.hidden"],
        }

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield embedding(ours, "model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
        yield same("head.weight", "lm_head.weight")
        yield Pair(("head.bias",), ("final_logits_bias",), Row())
        for here, there, layers in (("encoder.", "model.encoder", ours["n_encoder_layers"]), ("", "model.decoder", ours["n_layers"])):
            yield Pair((f"{here}position.weight",), (f"{there}.embed_positions.weight",), SkipRows(self.unused))
            yield from module(f"{here}embed_norm", f"{there}.layernorm_embedding")
            for i in range(layers):
                yield from self.block(f"{here}blocks.{i}", f"{there}.layers.{i}")

    def block(self, here: str, there: str) -> Iterator[Pair]:
        """Yields the pairs of one layer; only a decoder's has cross-attention."""
        for name, their_name in (("attention", "self_attn"), ("cross", "encoder_attn")):
            for part, their_part in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")):
                yield from module(f"{here}.{name}.{part}", f"{there}.{their_name}.{their_part}")
            yield from module(f"{here}.{name}_residual.norm", f"{there}.{their_name}_layer_norm")
        yield from module(f"{here}.ffn.up", f"{there}.fc1")
        yield from module(f"{here}.ffn.down", f"{there}.fc2")
        yield from module(f"{here}.ffn_residual.norm", f"{there}.final_layer_norm")


FAMILY = Bart()
