"""gpt-oss."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.gpt_oss import FAMILY  # noqa: E402
from lm.storage.reading import read_json  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 5.3, "beta_slow": 0.7, "truncate": False,
    "original_max_position_embeddings": 32,
}  # fmt: skip
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "num_local_experts": 5, "num_experts_per_tok": 2,
    "sliding_window": 11, "rope_parameters": YARN, "swiglu_limit": 1.3,
}  # fmt: skip
GLOBAL, LOCAL = "full_attention", "sliding_attention"
CASES: dict[str, dict[str, Any]] = {
    "windows in every second layer": {},
    "no biases on attention, tied": {"attention_bias": False, "tie_word_embeddings": True, "num_hidden_layers": 3},
    "windows in two of three": {"layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL], "num_experts_per_tok": 5, "num_key_value_heads": 1},
    "no scaling": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_gpt_oss(case: str, tmp_path: Path) -> None:
    theirs = transformers.GptOssForCausalLM(transformers.GptOssConfig(**BASE | CASES[case]))
    verify(theirs, tmp_path)
    assert read_json(tmp_path / "exported/config.json")["layer_types"] == theirs.config.layer_types


@pytest.mark.parametrize("more", [{}, {"rope_theta": 150000, "rope_scaling": YARN, "num_key_value_heads": 4}])
def test_gpt_oss_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.GptOssConfig, sizes | {"num_attention_heads": 8, "max_position_embeddings": 128} | more)


def test_other_patterns_of_layers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"layer_types=.*'full_attention', 'sliding_attention'"):
        FAMILY.config(BASE | {"layer_types": [LOCAL, GLOBAL, GLOBAL, LOCAL]})
