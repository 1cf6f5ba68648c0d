"""GPT-2."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}
CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, another width and activation": {"tie_word_embeddings": False, "n_inner": 100, "activation_function": "relu"},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_gpt2(case: str, tmp_path: Path) -> None:
    verify(transformers.GPT2LMHeadModel(transformers.GPT2Config(**BASE | CASES[case])), tmp_path)
