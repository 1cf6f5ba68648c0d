"""MiniMax-M2."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.minimax_m2 import FAMILY  # noqa: E402
from lm.hf.io.family import resolved  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128, "num_local_experts": 5, "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "half of each head": {},
    "all of it, tied": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "tie_word_embeddings": True},
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 1536, "max_position_embeddings": 196608, "model_type": "minimax_m2", "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "output_router_logits": False,
    "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_qk_norm": True, "use_routing_bias": True,
    "vocab_size": 200064,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_minimax_m2(case: str, tmp_path: Path) -> None:
    verify(transformers.MiniMaxM2ForCausalLM(transformers.MiniMaxM2Config(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize(
    "more",
    [{}, {"rope_theta": 500.0, "rotary_dim": 8, "head_dim": 16}, {"rotary_dim": 64, "partial_rotary_factor": 0.25, "num_experts": 16}],
)
def test_minimax_m2_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    old = sizes | {"num_attention_heads": 8, "max_position_embeddings": 128} | more
    old_spelling_agrees(FAMILY, transformers.MiniMaxM2Config, {FAMILY.renamed.get(key, key): value for key, value in old.items()})


def test_a_config_of_published_sizes_is_understood() -> None:
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert resolved(cfg)["position.fraction"] == 0.5


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("scoring_func", "softmax", "scoring_func='softmax' has no place"),
        ("use_qk_norm", False, "use_qk_norm=False has no place"),
        ("partial_rotary_factor", 0.25, "rotary_dim=64 has no place in lm's minimax_m2, which has 32"),
    ],
)
def test_what_has_no_place_is_refused_by_name(key: str, value: Any, said: str) -> None:
    hf = PUBLISHED | {key: value}
    with pytest.raises(ConfigError, match=said):
        unheard("config.json", hf, FAMILY, FAMILY.config(hf))
