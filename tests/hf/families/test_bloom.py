"""BLOOM."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.errors import CheckpointError, ConfigError
from lm.hf.io.files import SINGLE
from lm.hf.io.reading import CONFIG, read_hf

transformers = pytest.importorskip("transformers")

from tests.hf.harness import VOCAB, cases, logits_agree, ours_of, redraw, verify  # noqa: E402

BASE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 4}
CASES: dict[str, dict[str, Any]] = {
    "four heads": {},
    "six heads, untied": {"n_head": 6, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    "three heads": {"n_head": 3},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_bloom(case: str, tmp_path: Path) -> None:
    verify(transformers.BloomForCausalLM(transformers.BloomConfig(**BASE | CASES[case])), tmp_path)


@torch.no_grad()
def test_a_file_without_its_head_in_its_first_spelling_imports(tmp_path: Path) -> None:
    """As bloom-560m is published: no prefix, and other names in config.json."""
    theirs = transformers.BloomForCausalLM(transformers.BloomConfig(**BASE)).eval()
    redraw(theirs, embed_gain=2.0)
    theirs.transformer.save_pretrained(tmp_path)
    old = {"model_type": "bloom", "vocab_size": VOCAB, "n_embed": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    (tmp_path / CONFIG).write_text(json.dumps(old), encoding="utf-8")
    found = read_hf(tmp_path)
    assert found.notes == []
    logits_agree(theirs, ours_of(found))


def test_a_stored_copy_of_the_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    theirs = transformers.BloomForCausalLM(transformers.BloomConfig(**BASE))
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["lm_head.weight"] = tensors["transformer.word_embeddings.weight"].clone()
    save_file(tensors, tmp_path / SINGLE)
    assert read_hf(tmp_path).config.head.tied
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from transformer\.word_embeddings\.weight"):
        read_hf(tmp_path)


def test_a_residual_behind_the_norm_has_no_place(tmp_path: Path) -> None:
    option = {"apply_residual_connection_post_layernorm": True}
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "bloom", **BASE, **option}), encoding="utf-8")
    with pytest.raises(ConfigError, match="apply_residual_connection_post_layernorm=True has no place"):
        read_hf(tmp_path)
