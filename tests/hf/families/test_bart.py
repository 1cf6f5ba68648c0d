"""BART."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.errors import CheckpointError, ConfigError
from lm.hf.io.reading import CONFIG, read_hf

transformers = pytest.importorskip("transformers")

from tests.hf.harness import VOCAB, cases, logits_agree, ours_of, redraw, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 100, "decoder_ffn_dim": 100, "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, scaled embedding, another start": {
        "tie_word_embeddings": False, "scale_embedding": True, "activation_function": "relu", "decoder_start_token_id": 5,
    },
}  # fmt: skip
RIGHT = (False, False, False)  # in transformers a row's first place is position 0, padding or not


@pytest.mark.parametrize("case", cases(CASES))
def test_bart(case: str, tmp_path: Path) -> None:
    found = verify(transformers.BartForConditionalGeneration(transformers.BartConfig(**BASE | CASES[case])), tmp_path, lefts=RIGHT)
    assert found.config.kind == "encoder_decoder"
    assert found.config.start_token == CASES[case].get("decoder_start_token_id", 2)


@torch.no_grad()
def test_a_file_without_its_head_has_no_bias(tmp_path: Path) -> None:
    """As bart-base is published, beside a config.json of few keys."""
    theirs = transformers.BartForConditionalGeneration(transformers.BartConfig(**BASE)).eval()
    redraw(theirs, embed_gain=2.0)
    theirs.final_logits_bias.zero_()
    theirs.model.save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "bart", **BASE}), encoding="utf-8")
    logits_agree(theirs, ours_of(read_hf(tmp_path)), RIGHT)


@torch.no_grad()
def test_embeddings_that_differ_are_refused(tmp_path: Path) -> None:
    theirs = transformers.BartForConditionalGeneration(transformers.BartConfig(**BASE, tie_word_embeddings=False))
    theirs.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.shared\.weight, model\.encoder\.embed_tokens\.weight.* are not equal"):
        read_hf(tmp_path)


def test_heads_that_the_file_leaves_out_are_those_of_transformers(tmp_path: Path) -> None:
    """Seen to fail: those of the encoder were taken, where transformers has 16."""
    known = {name: value for name, value in BASE.items() if name != "decoder_attention_heads"}
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "bart", **known}), encoding="utf-8")
    with pytest.raises(ConfigError, match="decoder_attention_heads=16 is not that of the encoder, and has no place"):
        read_hf(tmp_path)


@pytest.mark.parametrize("option", [{"decoder_ffn_dim": 99}, {"decoder_attention_heads": 2}, {"normalize_before": True}])
def test_what_has_no_place_is_named(option: dict[str, Any], tmp_path: Path) -> None:
    [name] = option
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "bart", **BASE, **option}), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{name}=.* has no place"):
        read_hf(tmp_path)
