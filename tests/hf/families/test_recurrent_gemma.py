"""RecurrentGemma."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.recurrent_gemma import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.nn.mixers.rg_lru import RGLRUConfig  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "attention_window_size": 11, "logits_soft_cap": 5.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as published": {},
    "wider states, longer kernels, another part rotated, untied": {
        "lru_width": 72, "conv1d_width": 5, "block_types": ["attention", "recurrent"], "attention_bias": True, "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}, "tie_word_embeddings": False,
    },
    "attention alone": {"block_types": ["attention"], "hidden_activation": "relu", "num_hidden_layers": 2},
    "states alone, but for a last layer": {"block_types": ["recurrent", "recurrent", "recurrent", "attention"]},
}  # fmt: skip
UNPADDED = (False, False, False)  # on the left: transformers lets padding into the convolution of the tokens behind it


@pytest.mark.parametrize("case", cases(CASES))
def test_recurrent_gemma(case: str, tmp_path: Path) -> None:
    theirs = transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**SIZES | CASES[case]))
    verify(theirs, tmp_path, lefts=UNPADDED)


def test_a_config_of_published_sizes_is_understood() -> None:
    """The sizes of the 2B in the spelling of transformers 4."""
    there = {
        "_block_types": ["recurrent", "recurrent", "attention"], "architectures": ["RecurrentGemmaForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "attention_window_size": 2048, "block_types": ["recurrent", "recurrent", "attention"], "bos_token_id": 2,
        "conv1d_width": 4, "embeddings_scale_by_sqrt_dim": True, "eos_token_id": 1, "final_w_init_variance_scale": 0.07692307692307693,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560, "intermediate_size": 15360, "logits_soft_cap": 30.0,
        "lru_width": 2560, "model_type": "recurrent_gemma", "num_attention_heads": 10, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "use_cache": True, "vocab_size": 256000,
        "w_init_variance_scale": 0.01,
    }  # fmt: skip
    cfg = FAMILY.config(there)
    assert isinstance(cfg.recurrent, RGLRUConfig) and (cfg.recurrent.width, cfg.recurrent.n_heads) == (2560, 10)
    assert cfg.pattern == ["recurrent", "recurrent", "attention"] and cfg.embed.scale == 50.5
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation='relu' is of the recurrent layers' gates too"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "recurrent_gemma knows no rope_scaling"),
        ({"num_attention_heads": 5, "head_dim": 8}, "n_heads=5 does not divide width=48"),
        ({"block_types": ["recurrent", "mamba"]}, "pattern.1: 'mamba'"),
    ],
)
def test_what_the_class_does_not_compute_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FAMILY.config({**SIZES, **change})


def test_heads_of_attention_and_of_states_are_one_number_there() -> None:
    cfg = FAMILY.config(SIZES)
    assert isinstance(cfg.recurrent, RGLRUConfig) and FAMILY.homeless(cfg) == []
    assert FAMILY.homeless(cfg.replace(recurrent=cfg.recurrent.replace(n_heads=3))) == ["model.recurrent.n_heads=3 must be 6"]


def test_a_window_and_a_cap_of_the_logits_there_always_are() -> None:
    cfg = FAMILY.config(SIZES)
    assert FAMILY.homeless(cfg.replace(head=cfg.head.replace(softcap=None))) == ["model.head.softcap=null must be 30.0"]
    assert FAMILY.homeless(cfg.replace(attention=cfg.attention.replace(window=None))) == ["model.attention.window=null must be 2048"]
