"""DistilBERT."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.io.family import families  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import LENGTH, VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {"vocab_size": VOCAB, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 100, "max_position_embeddings": LENGTH}
CASES: dict[str, dict[str, Any]] = {"gelu": {}, "relu": {"activation": "relu"}}


@pytest.mark.parametrize("case", cases(CASES))
def test_distilbert(case: str, tmp_path: Path) -> None:
    theirs = transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**BASE | CASES[case]))
    found = verify(theirs, tmp_path, greedy=False)
    assert found.config.head.transform == case


def test_a_config_of_published_sizes_is_understood() -> None:
    """distilbert-base-uncased's, as its file has it; a model with segments goes to BERT."""
    there = {
        "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768, "dropout": 0.1,
        "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512, "model_type": "distilbert", "n_heads": 12,
        "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False,
        "tie_weights_": True, "vocab_size": 30522,
    }  # fmt: skip
    family = families()["distilbert"]
    cfg = family.config(there)
    assert unheard("config.json", there, family, cfg) == [] and family.homeless(cfg) == []
    assert family_for(cfg, imported=None).name == "distilbert"
    assert family_for(cfg.replace(embed={"norm": True, "segments": 2}), imported=None).name == "bert"
