"""What is like BART: Blenderbot, M2M-100 (NLLB), Marian, PEGASUS and PLBART."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from lm.errors import CheckpointError, ConfigError  # noqa: E402
from lm.hf.io.family import families  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.families.test_bart import RIGHT  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 100, "decoder_ffn_dim": 100, "max_position_embeddings": 64,
    "decoder_start_token_id": 5, "pad_token_id": 5,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "m2m-100": ("M2M100ForConditionalGeneration", {"pad_token_id": 1}),
    "m2m-100, untied, another activation, no scale": (
        "M2M100ForConditionalGeneration",
        {"pad_token_id": 1, "tie_word_embeddings": False, "activation_function": "gelu", "scale_embedding": False},
    ),
    "marian": ("MarianMTModel", {"activation_function": "swish", "scale_embedding": True}),
    "pegasus": ("PegasusForConditionalGeneration", {"activation_function": "relu", "scale_embedding": True}),
    "blenderbot": ("BlenderbotForConditionalGeneration", {"scale_embedding": True}),
    "plbart": ("PLBartForConditionalGeneration", {}),
    "blenderbot, untied": ("BlenderbotForConditionalGeneration", {"tie_word_embeddings": False, "activation_function": "relu"}),
    "marian, untied": ("MarianMTModel", {"tie_word_embeddings": False}),
    "pegasus, untied": ("PegasusForConditionalGeneration", {"tie_word_embeddings": False}),
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "blenderbot": {
        "activation_dropout": 0.0, "activation_function": "gelu", "add_bias_logits": False, "add_final_layer_norm": True,
        "architectures": ["BlenderbotForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 1, "d_model": 1280,
        "decoder_attention_heads": 32, "decoder_ffn_dim": 5120, "decoder_layerdrop": 0.0, "decoder_layers": 12,
        "decoder_start_token_id": 1, "dropout": 0.1, "encoder_attention_heads": 32, "encoder_ffn_dim": 5120, "encoder_layerdrop": 0.0,
        "encoder_layers": 2, "eos_token_id": 2, "forced_eos_token_id": 2, "is_encoder_decoder": True, "max_position_embeddings": 128,
        "model_type": "blenderbot", "normalize_before": True, "normalize_embedding": False, "num_hidden_layers": 2, "pad_token_id": 0,
        "scale_embedding": True, "static_position_embeddings": False, "use_cache": True, "vocab_size": 8008,
    },
    "m2m_100": {
        "activation_dropout": 0.0, "activation_function": "relu", "architectures": ["M2M100ForConditionalGeneration"],
        "attention_dropout": 0.1, "bos_token_id": 0, "d_model": 1024, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096,
        "decoder_layerdrop": 0, "decoder_layers": 12, "decoder_start_token_id": 2, "dropout": 0.1, "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4096, "encoder_layerdrop": 0, "encoder_layers": 12, "eos_token_id": 2, "init_std": 0.02,
        "is_encoder_decoder": True, "max_length": 200, "max_position_embeddings": 1024, "model_type": "m2m_100",
        "num_hidden_layers": 12, "pad_token_id": 1, "scale_embedding": True, "tokenizer_class": "NllbTokenizer", "use_cache": True,
        "vocab_size": 256206,
    },
    "marian": {
        "_num_labels": 3, "activation_dropout": 0.0, "activation_function": "swish", "add_bias_logits": False,
        "add_final_layer_norm": False, "architectures": ["MarianMTModel"], "attention_dropout": 0.0, "bad_words_ids": [[58100]],
        "bos_token_id": 0, "classif_dropout": 0.0, "classifier_dropout": 0.0, "d_model": 512, "decoder_attention_heads": 8,
        "decoder_ffn_dim": 2048, "decoder_layerdrop": 0.0, "decoder_layers": 6, "decoder_start_token_id": 58100,
        "decoder_vocab_size": 58101, "dropout": 0.1, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048, "encoder_layerdrop": 0.0,
        "encoder_layers": 6, "eos_token_id": 0, "forced_eos_token_id": 0, "init_std": 0.02, "is_encoder_decoder": True,
        "max_length": 512, "max_position_embeddings": 512, "model_type": "marian", "normalize_before": False,
        "normalize_embedding": False, "num_beams": 4, "num_hidden_layers": 6, "pad_token_id": 58100, "scale_embedding": True,
        "share_encoder_decoder_embeddings": True, "static_position_embeddings": True, "use_cache": True, "vocab_size": 58101,
    },
    "pegasus": {
        "activation_dropout": 0.1, "activation_function": "relu", "add_bias_logits": False, "add_final_layer_norm": True,
        "architectures": ["PegasusForConditionalGeneration"], "attention_dropout": 0.1, "d_model": 1024, "decoder_attention_heads": 16,
        "decoder_ffn_dim": 4096, "decoder_layerdrop": 0.0, "decoder_layers": 16, "decoder_start_token_id": 0, "dropout": 0.1,
        "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layerdrop": 0.0, "encoder_layers": 16, "eos_token_id": 1,
        "forced_eos_token_id": 1, "is_encoder_decoder": True, "max_position_embeddings": 512, "model_type": "pegasus",
        "normalize_before": True, "normalize_embedding": False, "num_hidden_layers": 16, "pad_token_id": 0, "scale_embedding": True,
        "static_position_embeddings": True, "vocab_size": 96103,
    },
}  # fmt: skip
"""blenderbot-400M-distill's, nllb-200-distilled-600M's, opus-mt-en-de's and pegasus-xsum's, as their files have them."""


@pytest.mark.parametrize("case", cases(CASES, quick=6))
def test_a_family_like_bart(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    model = getattr(transformers, name)
    verify(model(model.config_class(**BASE | options)), tmp_path, lefts=RIGHT)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_of_published_sizes_is_understood(name: str) -> None:
    family, there = families()[name], PUBLISHED[name]
    cfg = family.config(there)
    notes = unheard("config.json", there, family, cfg)
    assert all("init_std" in note or "max_length" in note for note in notes), notes
    assert family.homeless(cfg) == [] and family_for(cfg, imported=name).name == name


@torch.no_grad()
@pytest.mark.parametrize("name", ["MarianMTModel", "PegasusForConditionalGeneration"])
def test_positions_may_be_left_out_of_the_file_and_are_refused_where_they_are_no_sines(name: str, tmp_path: Path) -> None:
    model = getattr(transformers, name)
    theirs = model(model.config_class(**BASE))
    theirs.save_pretrained(tmp_path)
    path, key = tmp_path / "model.safetensors", "model.encoder.embed_positions.weight"
    tensors = {name: tensor for name, tensor in load_file(path).items() if "embed_positions" not in name}
    save_file(tensors, path)
    read_hf(tmp_path)
    table = theirs.state_dict()[key]
    save_file(tensors | {key: table.bfloat16()}, path)
    read_hf(tmp_path)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare | {key.removeprefix("model."): table}, path)  # as saved without the head; seen to fail: not known
    read_hf(tmp_path)
    save_file(tensors | {key: table + 0.1 * torch.randn_like(table)}, path)
    with pytest.raises(CheckpointError, match=r"model\.encoder\.embed_positions\.weight is not the constant"):
        read_hf(tmp_path)


def test_positions_behind_another_padding_token_are_refused() -> None:
    with pytest.raises(ConfigError, match="pad_token_id=5: positions begin behind it, and in lm behind 1"):
        families()["m2m_100"].config(BASE)
