"""ModernBERT, and its decoder."""

from pathlib import Path
from typing import Any

import pytest

from lm.errors import ConfigError
from lm.hf.families.modernbert import FAMILY
from lm.hf.families.modernbert_decoder import FAMILY as DECODER
from lm.hf.io.family import resolved
from lm.hf.options.keys import unheard

transformers = pytest.importorskip("transformers")

from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 128, "local_attention": 12, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "biases, untied, other activations": {
        "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True, "decoder_bias": False,
        "tie_word_embeddings": False, "hidden_activation": "silu", "classifier_activation": "relu", "norm_eps": 1e-3, "local_attention": 7,
    },
    "a scaling of global layers, which are others": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}},
    },
    "no windows": {"layer_types": ["full_attention"] * 4},
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_modernbert(case: str, tmp_path: Path) -> None:
    verify(transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**BASE | CASES[case])), tmp_path, greedy=False)


@pytest.mark.parametrize("case", cases(CASES))
def test_the_decoder(case: str, tmp_path: Path) -> None:
    """Its windows are of local_attention // 2 tokens, that which looks included."""
    found = verify(transformers.ModernBertDecoderForCausalLM(transformers.ModernBertDecoderConfig(**BASE | CASES[case])), tmp_path)
    window = CASES[case].get("local_attention", 12) // 2
    assert found.config.attention.tree()["window"] == (None if case == "no windows" else window)


def test_a_config_of_the_sizes_of_the_decoders_class_is_understood() -> None:
    there = transformers.ModernBertDecoderConfig().to_dict()
    cfg = DECODER.config(there)
    assert unheard("config.json", there, DECODER, cfg) == [] and DECODER.homeless(cfg) == []
    with pytest.raises(ConfigError, match="sliding_window=65 has no place in lm's modernbert-decoder, which has 64"):
        unheard("config.json", there | {"sliding_window": 65}, DECODER, cfg)


OWN = {"global_attn_every_n_layers": 2, "global_rope_theta": 500.0, "local_rope_theta": 90.0}


@pytest.mark.parametrize("more", [{}, OWN, OWN | {"rope_parameters": None}, {"rope_theta": 500.0, "rope_local_base_freq": 90.0}])
def test_modernbert_of_transformers_4(more: dict[str, Any]) -> None:
    """Seen to fail: the names that other families have for the two bases were read, where transformers' class knows its own alone."""
    new = transformers.ModernBertConfig(**BASE | more).to_dict()
    cfg = FAMILY.config(BASE | more)
    assert resolved(cfg) == resolved(FAMILY.config(new))
    assert unheard("config.json", BASE | more, FAMILY, cfg) == []


def test_an_export_names_the_bases_for_transformers_4() -> None:
    """Seen to fail: they were in rope_parameters alone, and transformers 4 took 160,000 and 10,000."""
    again = FAMILY.hf(FAMILY.config(BASE | OWN))
    assert (again["global_rope_theta"], again["local_rope_theta"]) == (500.0, 90.0)


def test_windows_in_another_pattern_are_refused() -> None:
    types = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    with pytest.raises(ConfigError, match=r"layer_types=.* is not a window in all layers but every n-th"):
        FAMILY.config({**BASE, "layer_types": types})
