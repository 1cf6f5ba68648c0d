"""Falcon."""

from pathlib import Path
from typing import Any

import pytest

from lm.errors import ConfigError
from lm.hf.families.falcon import FAMILY
from lm.hf.io.reading import read_hf

transformers = pytest.importorskip("transformers")

from tests.hf.harness import VOCAB, cases, change, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
NEW: dict[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "as 40B and 180B": NEW,
    "as 7B": {},
    "as 2-11B, untied": {**NEW, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    "two norms before one key": {**NEW, "num_kv_heads": 1, "ffn_hidden_size": 72},
    "one after the other, a key for each query, biases": {
        "multi_query": False, "parallel_attn": False, "bias": True, "activation": "relu",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    },
    "side by side, a key for each query": {"multi_query": False},
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_falcon(case: str, tmp_path: Path) -> None:
    verify(transformers.FalconForCausalLM(transformers.FalconConfig(**BASE | CASES[case])), tmp_path)


def test_alibi_is_refused_by_name(tmp_path: Path) -> None:
    transformers.FalconForCausalLM(transformers.FalconConfig(**BASE | {"num_hidden_layers": 1})).save_pretrained(tmp_path)
    change(tmp_path, alibi=True)
    with pytest.raises(ConfigError, match=r"alibi=True has no place in lm's falcon"):
        read_hf(tmp_path)


def test_the_hidden_width_is_four_times_the_models_where_none_is_told() -> None:
    assert FAMILY.hf(FAMILY.config(BASE))["ffn_hidden_size"] == 4 * BASE["hidden_size"]
