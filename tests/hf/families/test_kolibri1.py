"""Kolibri 1."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.kolibri1 import FAMILY  # noqa: E402
from lm.hf.io.family import families, resolved  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

FULL, WINDOW = "full_attention", "sliding_attention"
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "num_experts": 6, "num_experts_per_tok": 2,
    "max_position_embeddings": 128, "sliding_window": 11, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "the last of every five layers without a window": {},
    "weights that sum to 1, of every second": {
        "num_hidden_layers": 4, "layer_types": [WINDOW, FULL] * 2, "norm_topk_prob": True, "tie_word_embeddings": True,
    },
    "the first of every three": {"num_hidden_layers": 4, "layer_types": [FULL, WINDOW, WINDOW, FULL]},
    "windows in all layers": {"num_hidden_layers": 3, "layer_types": [WINDOW] * 3, "num_experts_per_tok": 1},
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_kolibri1(case: str, tmp_path: Path) -> None:
    verify(transformers.Kolibri1ForCausalLM(transformers.Kolibri1Config(**BASE | CASES[case])), tmp_path)


def test_the_config_of_transformers_defaults_is_understood() -> None:
    there = transformers.Kolibri1Config().to_dict()
    cfg = FAMILY.config(there)
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert family_for(cfg).name == "kolibri1"
    ours = resolved(cfg)
    assert (ours["attention.window"], ours["attention.global_every"], ours["position.none_every"]) == (513, 5, 5)
    others = {name: family.homeless(cfg) for name, family in families().items() if name != "kolibri1"}
    assert all(others.values()), "a family that adds the bias to scores would hold it"


def test_layers_of_which_none_rotates_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers without a window do not rotate, and in lm one of every n layers alone may"):
        FAMILY.config(BASE | {"num_local_experts": 6, "layer_types": [FULL] * 5})
