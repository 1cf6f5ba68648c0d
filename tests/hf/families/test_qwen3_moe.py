"""Qwen3 with experts."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.qwen3_moe import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "num_experts": 5,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "experts everywhere": {},
    "window, biases, the first dense, tied": {
        "use_sliding_window": True, "sliding_window": 11, "attention_bias": True, "mlp_only_layers": [0], "tie_word_embeddings": True,
    },
    "every second layer, weights as they are": {"decoder_sparse_step": 2, "norm_topk_prob": False},
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_qwen3_moe(case: str, tmp_path: Path) -> None:
    verify(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "num_experts": 16, "use_sliding_window": True, "mlp_only_layers": [0, 1]}])
def test_qwen3_moe_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.Qwen3MoeConfig, sizes | {"num_attention_heads": 8, "max_position_embeddings": 128} | more)


def test_other_programs_are_told_of_dense_layers_where_there_are_none() -> None:
    """MLX loads no file without intermediate_size; the one of a published file, which nothing reads, is no reason to refuse it."""
    cfg = FAMILY.config(BASE)
    assert FAMILY.hf(cfg)["intermediate_size"] == 20 and unheard("config.json", BASE, FAMILY, cfg) == []


def test_dense_layers_among_those_with_experts_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"mlp_only_layers=\[0, 2\]"):
        FAMILY.config(BASE | {"mlp_only_layers": [0, 2]})
