"""BERT."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.errors import ConfigError
from lm.hf.io.files import SINGLE
from lm.hf.io.reading import CONFIG, read_hf
from lm.nn.batch import Batch

transformers = pytest.importorskip("transformers")

from lm.testing.models import Doubles, same  # noqa: E402
from tests.hf.harness import LENGTH, VOCAB, cases, in_doubles, ours_of, padding, redraw, tokens, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 100,
    "max_position_embeddings": 64, "type_vocab_size": 3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {"gelu": {}, "relu": {"hidden_act": "relu", "layer_norm_eps": 1e-5, "type_vocab_size": 2}}


@pytest.mark.parametrize("case", cases(CASES))
def test_bert(case: str, tmp_path: Path) -> None:
    verify(transformers.BertForMaskedLM(transformers.BertConfig(**BASE | CASES[case])), tmp_path, greedy=False)


@torch.no_grad()
def test_segments_are_token_type_ids(tmp_path: Path) -> None:
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**BASE)).eval()
    ours = ours_of(verify(theirs, tmp_path, greedy=False))
    ids, (real, positions) = tokens(3, LENGTH, 7), padding(3, LENGTH, left=False)
    segments = tokens(3, LENGTH, 8) % 3
    with Doubles():
        expected = in_doubles(theirs)(ids, attention_mask=real.long(), token_type_ids=segments).logits
        found = ours(Batch(ids, positions=positions, segments=segments))
    same(found[real], expected[real])
    assert not torch.allclose(ours(Batch(ids, positions=positions))[real], expected[real], atol=0.1)


@torch.no_grad()
def test_files_of_pretraining_in_their_first_spelling_import(tmp_path: Path) -> None:
    """gamma and beta, a pooler, a second head, and a config.json of few keys."""
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**BASE))
    redraw(theirs, embed_gain=2.0)
    theirs.save_pretrained(tmp_path)
    norms = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(tmp_path / SINGLE)
    assert any("pooler" in name for name in tensors)
    for new, old in norms.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "bert", **BASE}), encoding="utf-8")
    ours, ids = ours_of(read_hf(tmp_path)), tokens(2, LENGTH, 3)
    with Doubles():
        same(ours(Batch(ids)), in_doubles(theirs)(ids).prediction_logits)


@pytest.mark.parametrize("option", [{"tie_word_embeddings": False}, {"is_decoder": True}, {"position_embedding_type": "relative_key"}])
def test_what_has_no_place_is_named(option: dict[str, Any], tmp_path: Path) -> None:
    [name] = option
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "bert", **BASE, **option}), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{name}=.* has no place"):
        read_hf(tmp_path)
