"""DeBERTa v2 and v3."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lm
from lm.data.rows.labelled import with_labels
from lm.errors import CheckpointError, ConfigError
from lm.hf.io.check import compare
from lm.hf.io.family import families, resolved
from lm.hf.io.files import SINGLE
from lm.hf.io.reading import CONFIG, read_hf
from lm.hf.io.writing import family_for, write_hf
from lm.hf.options.keys import unheard
from lm.nn.batch import Batch
from lm.testing.models import random_model

transformers = pytest.importorskip("transformers")

from tests.hf.harness import VOCAB, cases, change, ours_of, redraw, tokens, verify  # noqa: E402

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
    "keys alone, matrices of their own": {"pos_att_type": ["p2c"], "share_att_key": "absent", "max_relative_positions": 30},
    "matrices of their own, positions too": {"share_att_key": False, "position_biased_input": True, "type_vocab_size": 3},
    "a later head": {"legacy": False, "hidden_act": "relu"},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_deberta_v2(case: str, tmp_path: Path) -> None:
    options = {key: value for key, value in (BASE | CASES[case]).items() if value != "absent"}
    verify(transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**options)), tmp_path, greedy=False)


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


@pytest.mark.parametrize("cls", ["DebertaV2ForMaskedLM", "DebertaV2Model"])
@pytest.mark.parametrize("terms", [["p2c", "c2p"], []])
def test_vectors_of_distances_that_nothing_reads_are_left_out(terms: list[str], cls: str, tmp_path: Path) -> None:
    """A file without relative_attention may have their norm, and one whose scores name no terms, where it is set to false, all of them."""
    made = BASE | {"pos_att_type": terms, "relative_attention": not terms, "position_biased_input": True}
    getattr(transformers, cls)(transformers.DebertaV2Config(**made)).save_pretrained(tmp_path)
    change(tmp_path, relative_attention=False)
    ours, ids = ours_of(read_hf(tmp_path)), tokens(2, 9, seed=3)
    theirs = getattr(transformers, cls).from_pretrained(tmp_path).double().eval()
    with torch.no_grad():
        found = ours(Batch(ids), read=lambda hidden, head, ctx: hidden) if cls.endswith("Model") else ours(Batch(ids))
        torch.testing.assert_close(found, theirs(ids)[0])


def test_vectors_of_distances_that_scores_name_are_not_left_out(tmp_path: Path) -> None:
    transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**BASE)).save_pretrained(tmp_path)
    change(tmp_path, relative_attention=False)
    with pytest.raises(CheckpointError, match=r"1 tensors are not known \(deberta.encoder.rel_embeddings.weight\)"):
        read_hf(tmp_path)


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


def test_a_config_of_published_sizes_is_understood() -> None:
    """Of deberta-v3-base."""
    published = {
        "model_type": "deberta-v2", "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 512,
        "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": "p2c|c2p", "layer_norm_eps": 1e-7, "max_relative_positions": -1, "position_biased_input": False,
        "num_attention_heads": 12, "num_hidden_layers": 12, "type_vocab_size": 0, "vocab_size": 128100,
    }  # fmt: skip
    family = families()["deberta-v2"]
    cfg = family.config(published)
    assert unheard("config.json", published, family, cfg) == [] and family.homeless(cfg) == []
    assert family_for(cfg).name == "deberta-v2"
    preset = lm.config(overrides=["model=deberta_v3_base", "objective=mlm"]).model
    assert resolved(cfg) == resolved(preset)


def test_a_new_head_for_labels_is_the_one_of_transformers(tmp_path: Path) -> None:
    transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**BASE)).save_pretrained(tmp_path / "parent")
    cfg = with_labels(read_hf(tmp_path / "parent").config, ["no", "yes"])
    family, model = family_for(cfg, imported="deberta-v2"), random_model(cfg, seed=1)
    write_hf(tmp_path, family, cfg, {key: p.detach() for key, p in model.named_parameters()}, None)
    change(tmp_path, pad_token_id=0)
    found = compare(tmp_path, family, model)
    assert found.spread > 1e-3 and found.difference < 1e-4 * max(1.0, found.spread)
    assert resolved(read_hf(tmp_path).config) == resolved(cfg)


def test_another_scale_than_that_of_the_terms_is_told() -> None:
    """Seen to fail: it was told in words of config.json, that no term was named."""
    options = ["model=deberta_v3_base", "objective=mlm", "model.attention.scale=null"]
    with pytest.raises(ConfigError, match=r"there model\.attention\.scale=0\.125 must be 0\.0721687\d*\. Train with that"):
        family_for(lm.config(overrides=options).model, "deberta-v2")


def test_a_section_that_has_no_place_is_named_once() -> None:
    """Seen to fail: every key of it was named, to be set to null each."""
    options = ["model=bert_base", "objective=mlm", "model.attention.disentangled.n_buckets=8"]
    with pytest.raises(ConfigError, match=r"there model\.attention\.disentangled must be null\. Train with that"):
        family_for(lm.config(overrides=options).model, "bert")
