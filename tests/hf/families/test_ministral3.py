"""Ministral 3."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.ministral3 import FAMILY  # noqa: E402
from lm.hf.io.family import resolved  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "pad_token_id": None,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 500.0, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.5}
YARN = PLAIN | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_parameters": YARN},
    "no scaling, a window, tied": {"rope_parameters": PLAIN, "sliding_window": 9, "tie_word_embeddings": True},
    "no growth": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}, "num_key_value_heads": 6},
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_ministral3(case: str, tmp_path: Path) -> None:
    theirs = transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**BASE | CASES[case]))
    assert (resolved(verify(theirs, tmp_path).config).get("attention.query_growth.rate") is None) == (case == "no growth")


def test_a_config_of_the_sizes_of_its_class_is_understood() -> None:
    there = transformers.Ministral3Config().to_dict()
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert family_for(cfg).name == "ministral3"
    bare = {key: value for key, value in there.items() if key != "rope_parameters"}
    assert resolved(FAMILY.config(bare)) == resolved(cfg)


@pytest.mark.parametrize("key", ["llama_4_scaling_beta", "original_max_position_embeddings"])
def test_what_transformers_computes_the_growth_by_is_needed(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is missing among the rotary parameters, and ministral3 needs it"):
        FAMILY.config(BASE | {"rope_parameters": {name: value for name, value in PLAIN.items() if name != key}})


def test_steps_elsewhere_than_at_the_length_of_yarn_have_no_place() -> None:
    """One key says both."""
    cfg = FAMILY.config(BASE | {"rope_parameters": YARN})
    other = cfg.replace(attention=cfg.attention.replace(query_growth={"rate": 0.5, "every": 8}))
    assert FAMILY.homeless(other) == ["model.position.scaling.original_len=16 must be 8"]
