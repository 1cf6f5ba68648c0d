"""mBART."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.hf.families.bart import FAMILY as BART  # noqa: E402
from lm.hf.families.mbart import FAMILY  # noqa: E402
from tests.hf.families.test_bart import RIGHT  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 100, "decoder_ffn_dim": 100, "max_position_embeddings": 64,
    "decoder_start_token_id": 5,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, scaled embedding": {"tie_word_embeddings": False, "scale_embedding": True, "activation_function": "relu"},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_mbart(case: str, tmp_path: Path) -> None:
    found = verify(transformers.MBartForConditionalGeneration(transformers.MBartConfig(**BASE | CASES[case])), tmp_path, lefts=RIGHT)
    assert found.config.kind == "encoder_decoder" and found.config.start_token == 5


def test_it_is_no_bart() -> None:
    cfg = FAMILY.config(BASE | {"decoder_start_token_id": None})
    assert FAMILY.homeless(cfg) == []
    assert BART.homeless(cfg)[0] == "model.norm.place=pre must be post"
