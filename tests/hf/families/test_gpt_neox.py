"""GPT-NeoX."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.errors import ConfigError
from lm.hf.io.reading import CONFIG, read_hf

transformers = pytest.importorskip("transformers")

from tests.hf.harness import VOCAB, cases, logits_agree, ours_of, redraw, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 100,
    "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "parallel": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    "sequential, tied, no biases": {
        "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True, "hidden_act": "gelu_fast",
        "num_attention_heads": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
    "linear rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "factor": 2.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_gpt_neox(case: str, tmp_path: Path) -> None:
    verify(transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("old", [{"rotary_pct": 0.5, "rotary_emb_base": 500, "hidden_act": "gelu_fast"}, {"num_attention_heads": 6}])
@torch.no_grad()
def test_config_of_older_files_imports(old: dict[str, Any], tmp_path: Path) -> None:
    """Pythia's spelling, and the family's values where keys are missing."""
    config = transformers.GPTNeoXConfig(**BASE | old)
    theirs = transformers.GPTNeoXForCausalLM(config).eval()
    redraw(theirs, embed_gain=2.0)
    theirs.save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "gpt_neox", **BASE, **old}), encoding="utf-8")
    found = read_hf(tmp_path)
    assert found.notes == []
    logits_agree(theirs, ours_of(found))


def test_a_quarter_of_fourteen_dimensions_is_odd_and_refused(tmp_path: Path) -> None:
    """transformers counts 3 here, rounding down, and rotates 4 by the rates of 3."""
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "gpt_neox", **BASE, "hidden_size": 56}), encoding="utf-8")
    with pytest.raises(ConfigError, match="rotates 3 dimensions"):
        read_hf(tmp_path)
