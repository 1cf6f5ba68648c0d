"""DeBERTa v2 and v3."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.errors import ConfigError
from lm.hf.io.files import SINGLE
from lm.hf.io.reading import CONFIG, read_hf

transformers = pytest.importorskip("transformers")

from tests.hf.harness import VOCAB, cases, ours_of, redraw, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 100,
    "max_position_embeddings": 64, "type_vocab_size": 0, "relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "v3": {},
    "no distances": {"relative_attention": False, "position_biased_input": True, "pos_att_type": None, "type_vocab_size": 2},
    "scores made smaller alone": {"relative_attention": False, "position_biased_input": True},
    "queries alone, every distance": {"pos_att_type": ["c2p"], "position_buckets": -1, "norm_rel_ebd": "none"},
    "keys alone, matrices of their own": {"pos_att_type": ["p2c"], "share_att_key": False, "max_relative_positions": 30},
    "matrices of their own, positions too": {"share_att_key": False, "position_biased_input": True, "type_vocab_size": 3},
    "a later head": {"legacy": False, "hidden_act": "relu"},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_deberta_v2(case: str, tmp_path: Path) -> None:
    verify(transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**BASE | CASES[case])), tmp_path, greedy=False)


def test_a_published_file_imports(tmp_path: Path) -> None:
    """A config.json that names no class and no `legacy`, beside weights of the later head and of the one that told replaced tokens."""
    theirs = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**BASE, legacy=False))
    redraw(theirs, embed_gain=2.0)
    theirs.save_pretrained(tmp_path)
    expected = ours_of(read_hf(tmp_path)).state_dict()
    more = {f"mask_predictions.{name}": torch.zeros(48) for name in ("dense.bias", "LayerNorm.weight", "classifier.bias")}
    save_file(load_file(tmp_path / SINGLE) | more, tmp_path / SINGLE)
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "deberta-v2", **BASE}), encoding="utf-8")
    found = ours_of(read_hf(tmp_path)).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert "head.dense.weight" in found


@pytest.mark.parametrize(
    "changed, said",
    [
        (
            {"conv_kernel_size": 3},
            "conv_kernel_size=3: a convolution has no place in lm's deberta-v2. Import another model.",
        ),
        ({"embedding_size": 24}, "embedding_size=24: an embedding of that width has no place in lm's deberta-v2. Import another model."),
        ({"pos_att_type": "none"}, "pos_att_type names neither c2p nor p2c, and relative_attention is true. Set it to false."),
        ({"position_buckets": 128}, "max_distance=64 leaves nothing to share"),
    ],
)
def test_what_has_no_place_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "deberta-v2", **BASE, **changed}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_hf(tmp_path)
    assert said in str(caught.value)
