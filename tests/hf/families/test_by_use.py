"""Gemma 3, OLMo 3, SmolLM3, Phi, StableLM, Command R and R7B, EXAONE 4, Gemma 1, VaultGemma, both GLM-4, Helium,
Ministral and OPT."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.smollm3 import FAMILY as SMOLLM3  # noqa: E402
from lm.hf.io.family import families  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.hf.options.windows import FULL, SLIDING  # noqa: E402
from lm.nn.position.rope import RopeConfig  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LOCAL = {"rope_type": "default", "rope_theta": 90.0}
HALF = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 3, two bases and a scaling": (
        "Gemma3Text", {"head_dim": 10, "rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL}, **HALF},
    ),
    "olmo 3, a scaling of layers without a window": (
        "Olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": ROPE}, **HALF},
    ),
    "smollm 3": ("SmolLM3", {"rope_parameters": ROPE}),
    "phi": ("Phi", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "gemma 3, as usual": ("Gemma3Text", {"head_dim": 10, "query_pre_attn_scalar": 12, "sliding_window": 7, "num_hidden_layers": 6}),
    "gemma 3, soft-cap, untied": (
        "Gemma3Text", {"head_dim": 10, "final_logit_softcapping": 20.0, "tie_word_embeddings": False},
    ),
    "olmo 3, as usual": ("Olmo3", {"sliding_window": 11, "attention_bias": True}),
    "olmo 3, no windows": ("Olmo3", {"layer_types": ["full_attention"] * 4, "rope_parameters": {"full_attention": ROPE}}),
    "smollm 3, untied, biases, every second": (
        "SmolLM3", {"no_rope_layers": [1, 0, 1, 0], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "stablelm, as usual": ("StableLm", {"use_qkv_bias": True}),
    "stablelm, side by side": (
        "StableLm", {"use_parallel_residual": True, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "tie_word_embeddings": True},
    ),
    "command r, as usual": ("Cohere", {"logit_scale": 1.0}),
    "command r, untied, biases": (
        "Cohere",
        {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.5, "layer_norm_eps": 1e-3, "rope_parameters": ROPE},
    ),
    "command r7b, as usual": ("Cohere2", {"sliding_window": 7, "logit_scale": 1.0}),
    "command r7b, a window in half of the layers, untied, biases, another width of heads": (
        "Cohere2",
        {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.5, "rope_parameters": YARN, "head_dim": 10, **HALF},
    ),
    "command r7b, a window in every layer": ("Cohere2", {"logit_scale": 1.0, "sliding_window": 9, "layer_types": [SLIDING] * 4}),
    "exaone 4, as usual": ("Exaone4", {"sliding_window": 7, "rope_parameters": ROPE}),
    "exaone 4, no windows, tied": (
        "Exaone4",
        {"sliding_window": None, "layer_types": [FULL] * 4, "head_dim": 10, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "exaone 4, a window in half of the layers": ("Exaone4", {"num_key_value_heads": 6, "hidden_act": "gelu", **HALF}),
    "gemma 1, as usual": ("Gemma", {"head_dim": 10, "rope_parameters": ROPE}),
    "gemma 1, untied, biases, gelu in its first files": (
        "Gemma", {"head_dim": 12, "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "gelu"},
    ),
    "gemma 1, another activation": ("Gemma", {"head_dim": 10, "hidden_act": "silu"}),
    "vaultgemma": ("VaultGemma", {"head_dim": 10, "query_pre_attn_scalar": 12, "sliding_window": 7}),
    "vaultgemma, no soft-caps, untied, biases": (
        "VaultGemma",
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
         "attention_bias": True, "hidden_activation": "silu", "layer_types": [FULL] * 4},
    ),
    "glm, as usual": ("Glm", {"head_dim": 12}),
    "glm, all of a head, no biases": (
        "Glm", {"head_dim": 8, "attention_bias": False, "rope_parameters": ROPE | {"partial_rotary_factor": 1.0}, "hidden_act": "gelu"},
    ),
    "helium, as usual": ("Helium", {"head_dim": 8, "rope_parameters": ROPE}),
    "helium, tied, biases": ("Helium", {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "ministral, a window in half of the layers": ("Ministral", {"head_dim": 10, "rope_parameters": YARN, **HALF}),
    "ministral, the first of four has none": (
        "Ministral",
        {"head_dim": 8, "sliding_window": 7, "layer_types": [FULL, SLIDING, SLIDING, SLIDING], "tie_word_embeddings": True},
    ),
    "ministral, as its class is": ("Ministral", {"head_dim": 8, "sliding_window": 7}),
    "ministral, no windows": ("Ministral", {"head_dim": 10, "layer_types": [FULL] * 4}),
    "glm 4, as usual": ("Glm4", {"head_dim": 12}),
    "glm 4, all of a head, no biases": (
        "Glm4", {"head_dim": 8, "attention_bias": False, "rope_parameters": ROPE | {"partial_rotary_factor": 1.0}, "hidden_act": "gelu"},
    ),
    "phi, all of a head, tied": ("Phi", {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}, "tie_word_embeddings": True}),
}  # fmt: skip
OPTS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "untied, no biases": {"enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"},
}
HEADS = {"Gemma3Text": "Gemma3ForCausalLM"}


@pytest.mark.parametrize("case", cases(CASES))
def test_families(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    verify(getattr(transformers, HEADS.get(name, f"{name}ForCausalLM"))(config), tmp_path)


@pytest.mark.parametrize("case", cases(OPTS, quick=0))
def test_opt(case: str, tmp_path: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "intermediate_size")}
    verify(transformers.OPTForCausalLM(transformers.OPTConfig(**sizes | {"ffn_dim": 72} | OPTS[case])), tmp_path)


def test_layers_without_positions_in_another_pattern_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no_rope_layers=\[1, 0, 0, 1\] are not 0 in every n-th layer"):
        SMOLLM3.config({**SIZES, "no_rope_layers": [1, 0, 0, 1]})


PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "cache_implementation": "hybrid",
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4,
        "logit_scale": 0.25, "max_position_embeddings": 132096, "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
        "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
        "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
        "vocab_size": 256000,
    },
    "exaone4": {
        "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 27392, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 16,
        "max_position_embeddings": 131072, "model_type": "exaone4", "num_attention_heads": 40, "num_hidden_layers": 64,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False, "vocab_size": 102400,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 256, "hidden_act": "gelu",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "intermediate_size": 16384, "max_position_embeddings": 8192,
        "model_type": "gemma", "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_of_published_sizes_is_understood(name: str) -> None:
    """The sizes of the 7B, the 32B and the 2B in the spelling of transformers 4."""
    family, there = families()[name], PUBLISHED[name]
    cfg = family.config(there)
    assert unheard("config.json", there, family, cfg) == [] and family.homeless(cfg) == []
    assert isinstance(cfg.position, RopeConfig) and cfg.position.none_every == (None if name == "gemma" else 4)


def test_exaone_4_tells_its_windows_by_letters_too() -> None:
    """MLX looks at these alone, and loads no file without them."""
    family, there = families()["exaone4"], PUBLISHED["exaone4"]
    assert family.hf(family.config(there))["sliding_window_pattern"] == "LLLG" * 16
    assert family.hf(family.config(there | {"sliding_window": None, "layer_types": [FULL] * 64}))["sliding_window_pattern"] is None


def test_heads_of_helium_that_are_not_as_wide_as_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="the heads of a helium are as wide together as hidden_size=48, and not 60"):
        families()["helium"].config({**SIZES, "head_dim": 10})


@pytest.mark.parametrize("name", ["cohere2", "exaone4"])
@pytest.mark.parametrize(
    ("types", "said"),
    [
        ([FULL] * 4, "layers without a window do not rotate, and in lm one of every n layers alone"),
        ([FULL, FULL, SLIDING, SLIDING], "is not a window in all layers but every n-th"),
    ],
    ids=["all", "uneven"],
)
def test_layers_without_rotation_in_another_pattern_are_refused(name: str, types: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        families()[name].config({**SIZES, "sliding_window": 9, "layer_types": types})
