"""DeepSeek-V3.2."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.deepseek_v32 import FAMILY  # noqa: E402
from tests.hf.families.test_deepseek_v3 import BASE as V3  # noqa: E402
from tests.hf.families.test_deepseek_v3 import YARN  # noqa: E402
from tests.hf.harness import cases, verify  # noqa: E402

BASE: dict[str, Any] = V3 | {"index_n_heads": 12, "index_head_dim": 10, "index_topk": 5}
CASES: dict[str, dict[str, Any]] = {
    "groups": {},
    "heads that rotate whole, biases": {"index_head_dim": 6, "attention_bias": True, "tie_word_embeddings": True},
    "yarn": {"rope_parameters": YARN, "index_topk": 1},
    "two dense layers, all seen": {"first_k_dense_replace": 2, "index_topk": 1000},
    "experts everywhere": {"mlp_layer_types": ["sparse"] * 3, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_deepseek_v32(case: str, tmp_path: Path) -> None:
    verify(transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("changes, refused", [
    ({"q_lora_rank": None}, "makes all queries of a latent"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types names 'full_attention'"),
    ({"index_head_dim": 4}, "indexer.head_dim=4 is below the 6 dimensions that rotate"),
])  # fmt: skip
def test_what_is_not_of_the_family_is_refused(changes: dict[str, Any], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        FAMILY.config(BASE | changes)
