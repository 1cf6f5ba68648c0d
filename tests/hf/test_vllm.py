"""What `lm export` says of vLLM, which cannot be run here: by its source."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from lm.hf.io import sglang, vllm
from lm.hf.io.family import families, resolved
from lm.hf.io.writing import family_for
from lm.nn.model_config import ModelConfig
from tests.hf.gguf_models import DEEP, EXPERT, EXPERTS, HEADS, MLA, MLP, ROPE, built

HEAD: dict[str, Any] = HEADS | {"head_dim": 32}
NORMED: dict[str, Any] = HEAD | {"qk_norm": "head"}
OWN, THEIRS = "vllm serve out", "vllm serve out --model-impl transformers"
LONG: dict[str, Any] = {"kind": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_len": 16}
LLAMA4: dict[str, Any] = {
    "attention": HEAD | {"window": 16, "chunked": True, "global_every": 2},
    "position": ROPE | {"interleaved": True, "none_every": 2},
    "ffn": EXPERTS | {"n_shared": 1, "weigh_inputs": True, "router": {"kind": "plain_sigmoid", "normalize": False}},
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({"attention": HEAD}, OWN),
    "qwen3": ({"attention": NORMED}, OWN),
    "geglu": ({"attention": NORMED, "ffn": MLP | {"activation": "gelu"}}, THEIRS),
    "windows in all layers": ({"attention": NORMED | {"window": 16}}, OWN),
    "windows in some layers": ({"attention": NORMED | {"window": 16, "global_every": 2}}, THEIRS),
    "a bias behind the heads": ({"attention": NORMED | {"qkv_bias": True, "out_bias": True}}, THEIRS),
    "a given factor beside longrope": (
        {"attention": HEAD, "position": ROPE | {"scaling": LONG | {"attention_factor": 2.0}}},
        THEIRS,
    ),
    "rotary positions of which a part turns": (
        {"attention": HEAD, "position": ROPE | {"scaling": {"kind": "proportional", "partial_rotary_factor": 0.5}}},
        "whether it has model.position.scaling.kind=proportional was not checked",
    ),
    "queries that grow": ({"attention": HEAD | {"query_growth": {"rate": 0.1, "every": 16}}}, THEIRS),
    "experts": ({"attention": HEAD, "ffn": EXPERTS}, OWN),
    "experts of geglu": (
        {"attention": HEAD, "ffn": EXPERTS | {"expert": EXPERT | {"activation": "gelu"}}},
        "its MixtralForCausalLM has no model.ffn.expert.activation=gelu, and there it must be silu",
    ),
    "weights of experts that add up to 1": ({"d_model": 128, "attention": HEADS | {"qk_norm": "full"}, "ffn": EXPERTS}, THEIRS),
    "latent attention": ({"attention": MLA, "ffn": DEEP, "position": ROPE | {"interleaved": True}}, OWN),
    "latent attention whose halves rotate": ({"attention": MLA, "ffn": DEEP}, THEIRS),
    "latent attention before experts of geglu": (
        {"attention": MLA, "ffn": DEEP | {"expert": EXPERT | {"activation": "gelu"}, "dense": MLP | {"activation": "gelu"}}},
        "its DeepseekV3ForCausalLM has no model.ffn.expert.activation=gelu, and there it must be silu",
    ),
    "a tied head behind latent attention": (
        {"attention": MLA, "ffn": DEEP, "position": ROPE | {"interleaved": True}, "head": {"tied": True}},
        THEIRS,
    ),
    "chunks where it rotates": (LLAMA4, OWN),
    "chunks elsewhere": (
        LLAMA4 | {"position": ROPE | {"interleaved": True}},
        "its Llama4ForCausalLM has no chunks elsewhere than in the layers that rotate",
    ),
}


def said(cfg: ModelConfig) -> str:
    command, why = vllm.serve(family_for(cfg), resolved(cfg), Path("out"))
    return command or why


@pytest.mark.parametrize("case", CASES)
def test_a_command_is_given_only_where_vllm_computes_the_same(case: str) -> None:
    changes, expected = CASES[case]
    assert said(built(changes).cfg) == expected


def test_heads_count_only_where_there_are_some() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 48, "num_heads": 2, "head_dim": 48, "n_groups": 1, "vocab_size": 99}
    assert said(families()["mamba2"].config(sizes)) == OWN


SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "n_layer": 4, "hidden_size": 64, "num_attention_heads": 2, "n_head": 2, "num_key_value_heads": 2,
    "vocab_size": 99, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "max_position_embeddings": 64,
}  # fmt: skip
CONVS = {"layer_types": ["conv"] * 3 + ["full_attention"]}
UNTIED = "its {} has no model.head.tied=false, and there it must be true"
TIED = "its {} has no model.head.tied=true, and there it must be false"
HEADS_OF: dict[str, tuple[dict[str, Any], str, str]] = {  # keys of config.json; what is said of an own head, and of a tied one
    "cohere": ({}, THEIRS, OWN),
    "gemma2": ({"head_dim": 32}, THEIRS, OWN),
    "lfm2": (CONVS, UNTIED.format("Lfm2ForCausalLM"), OWN),
    "lfm2_moe": (CONVS, UNTIED.format("Lfm2MoeForCausalLM"), OWN),
    "bloom": ({}, UNTIED.format("BloomForCausalLM"), OWN),
    "olmoe": ({}, OWN, THEIRS),
    "jamba": ({"num_hidden_layers": 5}, OWN, TIED.format("JambaForCausalLM")),
    "qwen3_next": ({"head_dim": 32, "num_experts_per_tok": 2}, OWN, TIED.format("Qwen3NextForCausalLM")),
    "qwen3_5_text": ({"head_dim": 32}, OWN, OWN),
}


@pytest.mark.parametrize("name", HEADS_OF)
def test_classes_that_never_tie_the_head_or_always_do_are_told(name: str) -> None:
    keys, own, tied = HEADS_OF[name]
    for tie, expected in ((False, own), (True, tied)):
        cfg = families()[name].config(SIZES | keys | {"tie_word_embeddings": tie})
        assert (cfg.head.tied, said(cfg)) == (tie, expected)


def test_a_window_of_cohere2_has_one_token_more_there() -> None:
    """By its commandr.py, which so has the window of the training; transformers has `sliding_window` tokens."""
    assert said(families()["cohere2"].config(SIZES | {"sliding_window": 16})) == THEIRS
    assert said(families()["cohere2"].config(SIZES | {"sliding_window": 64})) == OWN


NEEDED: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 32, "qk_norm": True, "route_norm": True},
    "lfm2": {
        "block_dim": 64, "conv_dim": 64, "block_auto_adjust_ff_dim": False, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_keys_that_its_classes_read_and_transformers_does_not_are_written(name: str) -> None:
    """By glm4_moe_lite.py, hy_v3.py and lfm2.py of its release 0.33: without them it does not start, or has no norm of the heads."""
    family = families()[name]
    written = family.hf(family.config(SIZES | {"num_experts_per_tok": 2}))
    assert NEEDED[name].items() <= written.items()
    assert resolved(family.config(written)) == resolved(family.config(SIZES | {"num_experts_per_tok": 2}))


def test_of_hybrids_what_its_classes_have_not_is_told() -> None:
    jamba = {"num_hidden_layers": 5, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 99}
    assert said(families()["jamba"].config(jamba)) == OWN
    told = said(families()["jamba"].config(jamba | {"head_dim": 32}))
    assert told == "its JambaForCausalLM has no heads of 64 numbers together, and there they must be model.d_model=128"
    nemotron = {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "vocab_size": 99}
    assert said(families()["nemotron_h"].config(nemotron | {"time_step_min": 1e-30})) == OWN
    told = said(families()["nemotron_h"].config(nemotron))
    assert told == "its NemotronHForCausalLM has no model.recurrent.step_floor=0.001, and there it must be 0.0"


def test_families_are_known_and_let_vllm_replace_their_attention() -> None:
    known = families()
    assert known.keys() >= {*vllm.ABSENT, *vllm.UNCHECKED, *vllm.ALLOWED, *vllm.THEIRS, *vllm.SQUARE}
    assert {known[name].fixed["kind"] for name in (*vllm.ABSENT, *vllm.UNCHECKED, *sglang.ABSENT)} == {"decoder"}
    assert vllm.ALLOWED.keys() >= vllm.THEIRS.keys()
    classes = [getattr(transformers, known[name].architecture) for name in vllm.THEIRS]
    assert len(classes) > 20
    assert all(cls.is_backend_compatible() or cls._can_set_attn_implementation() for cls in classes)
