"""Granite with windows and sinks, dense and with experts."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.granite_swa import FAMILY  # noqa: E402
from lm.hf.families.granitemoe_swa import FAMILY as EXPERTS  # noqa: E402
from lm.hf.io import vllm  # noqa: E402
from lm.hf.io.family import resolved  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

FULL, WINDOW = "full_attention", "sliding_attention"
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "sliding_window": 11, "embedding_multiplier": 1.7,
    "attention_multiplier": 0.21, "residual_multiplier": 0.6, "logits_scaling": 1.6, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "the first of every four layers without a window": {},
    "layers without a window do not rotate, biases": {
        "num_hidden_layers": 4, "layer_types": [WINDOW, FULL] * 2, "layer_rope_theta": [700.0, 0.0] * 2, "attention_bias": True,
    },
    "the first of every four does not rotate": {"layer_rope_theta": [0.0, 9.0, 9.0, 9.0, 0.0]},
    "two bases": {"layer_rope_theta": [9000.0, 80.0, 80.0, 80.0, 9000.0], "tie_word_embeddings": False},
    "no window, stretched": {
        "num_hidden_layers": 3, "layer_types": [FULL] * 3, "num_key_value_heads": None,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    },
}  # fmt: skip
MOE: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2}
SHARED: dict[str, Any] = {"shared_intermediate_size": 28}


@pytest.mark.parametrize("case", cases(CASES, quick=3))
def test_granite_swa(case: str, tmp_path: Path) -> None:
    verify(transformers.GraniteSWAForCausalLM(transformers.GraniteSWAConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("case", cases(CASES))
@pytest.mark.parametrize("more", [{}, SHARED], ids=["experts", "a shared one"])
def test_granitemoe_swa(case: str, more: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.GraniteMoeSWAConfig(**BASE | MOE | CASES[case] | more)
    verify(transformers.GraniteMoeSWAForCausalLM(config), tmp_path)


@pytest.mark.parametrize(("family", "config"), [(FAMILY, "GraniteSWAConfig"), (EXPERTS, "GraniteMoeSWAConfig")])
def test_the_config_of_transformers_defaults_is_understood(family: Any, config: str) -> None:
    there = getattr(transformers, config)().to_dict()
    cfg = family.config(there)
    assert unheard("config.json", there, family, cfg) == [] and family.homeless(cfg) == []
    assert family_for(cfg).name == family.name
    ours = resolved(cfg)
    assert (ours["attention.window"], ours["attention.global_every"], ours["attention.global_at"]) == (128, 4, 0)


@pytest.mark.parametrize(
    "bases, more",
    [
        ([0.0, 0.0, 9.0, 9.0, 9.0], {}),
        ([0.0] * 5, {}),
        ([9.0, 9.0, 8.0, 9.0, 9.0], {}),
        ([9.0, 8.0, 8.0, 8.0, 9.0], {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}),
    ],
)
def test_rotary_bases_without_a_place_are_refused_by_name(bases: list[float], more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"layer_rope_theta=\[.*\]: in lm layers without and with a window have one base each"):
        FAMILY.config(BASE | {"layer_rope_theta": bases} | more)


@pytest.mark.parametrize("n", [0, 4, 6])
def test_bases_of_another_number_of_layers_are_refused(n: int) -> None:
    with pytest.raises(ConfigError, match=rf"layer_rope_theta has {n} layers and num_hidden_layers is 5\. Restore the file"):
        FAMILY.config(BASE | {"layer_rope_theta": [500.0] * n})


def test_what_was_not_checked_with_vllm_is_told(tmp_path: Path) -> None:
    said = vllm.serve(FAMILY, resolved(FAMILY.config(BASE | {"hidden_size": 192})), tmp_path)
    assert said == (None, "whether it has GraniteSWAForCausalLM and computes the same was not checked")
