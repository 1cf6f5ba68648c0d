"""Marian, the translators of OPUS-MT.  Junczys-Dowmunt et al. 2018, arXiv:1804.00344."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lm.errors import ConfigError
from lm.hf.families.bart import Bart
from lm.nn.position.absolute import Sinusoidal, SinusoidalConfig
from lm.schema import Tree


class Marian(Bart):
    """BART with sines and cosines for positions, and no norm behind the embedding."""

    name = "marian"
    architecture = "MarianMTModel"
    needs_start = True
    fields = {**Bart.fields, "start_token": ("decoder_start_token_id", 58100)}
    further = (*Bart.further, "decoder_vocab_size", "share_encoder_decoder_embeddings")
    fixed = {**Bart.fixed, "embed.norm": False, "position.kind": "sinusoidal", "position.theta": 10000.0, "position.halves": True}
    fixed_there = {
        **Bart.fixed_there, "normalize_embedding": False, "static_position_embeddings": True, "add_bias_logits": False,
        "share_encoder_decoder_embeddings": True,
    }  # fmt: skip

    def read(self, hf: Tree) -> Tree:
        if (size := hf.get("decoder_vocab_size")) not in (None, hf["vocab_size"]):
            raise ConfigError(
                f"config.json: decoder_vocab_size={size} is not vocab_size, and stacks of lm share one vocabulary. Import another model."
            )
        return super().read(hf)

    def write(self, ours: Tree) -> Tree:
        return {**super().write(ours), "decoder_vocab_size": ours["vocab_size"], "pad_token_id": ours["start_token"]}  # 58100 if missing

    def constants(self, ours: Tree) -> Mapping[str, Tensor]:
        return tables(ours)


def tables(ours: Tree) -> Mapping[str, Tensor]:
    """Returns both stacks' tables of positions, which transformers stores beside the weights."""
    waves = Sinusoidal(SinusoidalConfig(halves=True)).waves(torch.arange(ours["max_seq_len"]), ours["d_model"])
    return {f"model.{stack}.embed_positions.weight": waves for stack in ("encoder", "decoder")}


FAMILY = Marian()
