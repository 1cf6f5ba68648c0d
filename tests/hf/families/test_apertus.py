"""Apertus."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.hf.families.apertus import FAMILY

transformers = pytest.importorskip("transformers")

from lm.errors import CheckpointError, ConfigError  # noqa: E402
from lm.hf.io.family import families  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, old_spelling_agrees, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "biases, another width of heads": {
        "attention_bias": True, "head_dim": 10, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "the llama3 of its class, tied": {"tie_word_embeddings": True, "num_key_value_heads": None, "rms_norm_eps": 1e-3},
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["ApertusForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 68,
    "hidden_act": "xielu", "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 21504,
    "max_position_embeddings": 65536, "mlp_bias": False, "model_type": "apertus", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pad_token_id": 3, "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
        "type": "llama3",
    },
    "rope_theta": 12000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 131072,
}  # fmt: skip


def theirs(**changes: Any) -> Any:
    return transformers.ApertusForCausalLM(transformers.ApertusConfig(**BASE | changes))


@pytest.mark.parametrize("case", cases(CASES))
def test_apertus(case: str, tmp_path: Path) -> None:
    found = verify(theirs(**CASES[case]), tmp_path)
    assert found.config.ffn.tree()["activation"] == "xielu" and "blocks.2.ffn.act.alpha_n" in found.weights


def test_apertus_of_transformers_4() -> None:
    old_spelling_agrees(FAMILY, transformers.ApertusConfig, BASE | {"rope_theta": 500.0, "rope_scaling": PUBLISHED["rope_scaling"]})


def test_a_config_of_published_sizes_is_understood() -> None:
    """Of the 8B."""
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    assert family_for(cfg, imported=None).name == "apertus"


@pytest.mark.parametrize("changes", [{"hidden_act": "silu"}, {"mlp_bias": True}, {"qk_norm": False}])
def test_what_has_no_place_is_refused_by_name(changes: dict[str, Any]) -> None:
    [(key, value)], there = changes.items(), PUBLISHED | changes
    with pytest.raises(ConfigError, match=f"{key}={value!r} has no place in lm's apertus"):
        unheard("config.json", there, FAMILY, FAMILY.config(there))


@pytest.mark.parametrize("name", ["llama", "arcee", "gemma2", "phi3"])
def test_no_other_family_has_the_activation(name: str) -> None:
    """Llama's class would build it with weights of its own, which no file of Llama holds."""
    cfg = FAMILY.config(PUBLISHED)
    assert any("activation" in refusal or "hidden_act" in refusal for refusal in families()[name].homeless(cfg))
    with pytest.raises(ConfigError, match=r"'xielu' is not known\. Known are silu"):
        families()["llama"].config(PUBLISHED | {"model_type": "llama"})


def test_an_activation_with_another_constant_is_refused(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {(key := "model.layers.1.mlp.act_fn.beta"): torch.tensor(0.4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{key} is not the constant that it is in this family"):
        read_hf(tmp_path)
