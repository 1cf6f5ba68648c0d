"""Gemma 2."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.gemma2 import FAMILY  # noqa: E402
from lm.hf.families.gemma3 import FAMILY as GEMMA3  # noqa: E402
from lm.nn.position.rope import RopeConfig  # noqa: E402
from lm.nn.position.scaling import YarnScaling  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "sliding_window": 11, "query_pre_attn_scalar": 13,
    "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, biases": {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 3},
    "no soft-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "num_hidden_layers": 3},
    "no windows": {"layer_types": ["full_attention"] * 4},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_gemma2(case: str, tmp_path: Path) -> None:
    verify(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 2}])
def test_gemma2_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.Gemma2Config, sizes | {"num_attention_heads": 8, "max_position_embeddings": 128} | more)


def test_windows_stay_where_the_model_ends_before_the_first_global_layer() -> None:
    cfg = FAMILY.config(BASE)
    assert FAMILY.homeless(cfg) == []
    assert FAMILY.homeless(cfg.replace(n_layers=1)) == []


def test_what_its_config_cannot_say_has_no_home() -> None:
    cfg = FAMILY.config(BASE)
    [found] = FAMILY.homeless(cfg.replace(attention=cfg.attention.replace(scale=0.3)))
    assert found.startswith("model.attention.scale=0.3 must be 0.3015")
    [found] = FAMILY.homeless(cfg.replace(embed=cfg.embed.replace(scale=7.5)))
    assert found == f"model.embed.scale=7.5 must be {cfg.d_model**0.5}"


def test_gemma_3_truncates_whatever_its_file_says() -> None:
    """Seen to fail: transformers 5.23 looks for it beside the kinds of layers, where no file has it, and our logits were others."""
    there = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 100, "rope_theta": 10000.0, "truncate": False}
    local = {"rope_type": "default", "rope_theta": 10000.0}
    base = {key: value for key, value in BASE.items() if not key.endswith("softcapping")}
    cfg = GEMMA3.config({**base, "model_type": "gemma3_text", "rope_parameters": {"full_attention": there, "sliding_attention": local}})
    assert isinstance(cfg.position, RopeConfig) and isinstance(cfg.position.scaling, YarnScaling) and cfg.position.scaling.truncate
    scaling = cfg.position.scaling.replace(truncate=False)
    assert GEMMA3.homeless(cfg.replace(position=cfg.position.replace(scaling=scaling))) != []
