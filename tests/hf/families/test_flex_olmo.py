"""FlexOlmo."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.flex_olmo import FAMILY  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts": 5, "num_experts_per_tok": 2, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "weights as they are": {},
    "weights that sum to 1, biases, heads of another width, tied": {
        "norm_topk_prob": True, "attention_bias": True, "head_dim": 10, "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_flex_olmo(case: str, tmp_path: Path) -> None:
    verify(transformers.FlexOlmoForCausalLM(transformers.FlexOlmoConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "num_experts": 16, "norm_topk_prob": True, "num_key_value_heads": 4}])
def test_flex_olmo_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.FlexOlmoConfig, sizes | {"num_attention_heads": 8, "max_position_embeddings": 128} | more)


def test_the_norms_tell_it_from_olmoe() -> None:
    cfg = FAMILY.config(BASE)
    before = cfg.replace(norm=cfg.norm.replace(place="pre"))
    assert [family_for(each).name for each in (cfg, before)] == ["flex_olmo", "olmoe"]
