"""Granite with experts, and with a shared one beside them."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.adapters.adapter import LoRAConfig, adapting  # noqa: E402
from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.granitemoe import FAMILY  # noqa: E402
from lm.hf.families.granitemoeshared import FAMILY as SHARED  # noqa: E402
from lm.hf.families.mixtral import FAMILY as MIXTRAL  # noqa: E402
from lm.hf.io.peft import write_peft  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.nn.transformer import build_model  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "num_local_experts": 5, "num_experts_per_tok": 2,
    "embedding_multiplier": 1.7, "attention_multiplier": 0.21, "residual_multiplier": 0.6, "logits_scaling": 1.6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "two of five": {},
    "three of four, biases, tied": {
        "num_local_experts": 4, "num_experts_per_tok": 3, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None,
    },
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.1, "attention_multiplier": 0.015625,
    "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 131072,
    "model_type": "granitemoe", "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1500000.0, "router_aux_loss_coef": 0.001, "tie_word_embeddings": True, "vocab_size": 49152,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_granitemoe(case: str, tmp_path: Path) -> None:
    verify(transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("case", cases(CASES))
def test_granitemoeshared(case: str, tmp_path: Path) -> None:
    config = transformers.GraniteMoeSharedConfig(**BASE | {"shared_intermediate_size": 28} | CASES[case])
    verify(transformers.GraniteMoeSharedForCausalLM(config), tmp_path)


def test_no_shared_expert_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"shared_intermediate_size=0 leaves no shared expert\. Set model_type to granitemoe\."):
        SHARED.config(BASE | {"shared_intermediate_size": 0})
    cfg = SHARED.config(BASE | {"shared_intermediate_size": 28})
    assert family_for(cfg).name == "granitemoeshared" and FAMILY.homeless(cfg)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "logits_scaling": 8.0, "num_key_value_heads": 2, "num_local_experts": 4}])
def test_granitemoe_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    old_spelling_agrees(FAMILY, transformers.GraniteMoeConfig, sizes | {"num_attention_heads": 4, "max_position_embeddings": 128} | more)


def test_the_config_of_the_1b_is_understood() -> None:
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []


def test_a_model_without_factors_is_still_a_mixtral() -> None:
    sizes = {key: value for key, value in BASE.items() if not key.endswith(("multiplier", "scaling"))}
    cfg = MIXTRAL.config(sizes | {"sliding_window": None})
    assert FAMILY.homeless(cfg) == [] and family_for(cfg).name == "mixtral"


def test_adapters_of_experts_are_refused_by_peft(tmp_path: Path) -> None:
    """Seen to fail: transformers computed other logits, since its class has parameters of other names than the file."""
    cfg, adapter = FAMILY.config(BASE), LoRAConfig(rank=2, targets=["experts.up"])
    adapter.apply(model := build_model(cfg, seed=0))
    with pytest.raises(ConfigError, match=r"peft adds no adapter to model\.layers\.0\.block_sparse_moe\.input_linear of a granitemoe"):
        write_peft(tmp_path / "out", FAMILY, cfg, adapter, adapting(model), dict(model.named_parameters()), "me/mine")
