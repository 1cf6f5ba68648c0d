"""GLM-5."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.glm_moe_dsa import FAMILY  # noqa: E402
from tests.hf.families.test_deepseek_v32 import BASE as V32  # noqa: E402
from tests.hf.harness import cases, verify  # noqa: E402

BASE: dict[str, Any] = V32 | {"num_hidden_layers": 5}
CASES: dict[str, dict[str, Any]] = {
    "an indexer in each layer": {},
    "every second": {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    "two, then every third": {"indexer_types": ["full", "full", "shared", "shared", "full"], "index_topk": 3},
    "as letters": {"index_topk_pattern": "FSSSS"},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_glm_moe_dsa(case: str, tmp_path: Path) -> None:
    verify(transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("types", [["shared"] + ["full"] * 4, ["full", "shared", "full", "full", "shared"], ["full"] * 4, ["none"] * 5])
def test_layers_that_are_not_spaced_evenly_are_refused(types: list[str]) -> None:
    with pytest.raises(ConfigError, match="of 5 layers have indexers of their own"):
        FAMILY.config(BASE | {"indexer_types": types})
