"""What `lm export` says of vLLM, which cannot be run here: by its source."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from lm.hf.io import vllm
from lm.hf.io.family import families, resolved
from lm.hf.io.writing import family_for
from lm.nn.stack import ModelConfig
from tests.hf.gguf_models import DEEP, EXPERT, EXPERTS, HEADS, MLA, MLP, ROPE, built

HEAD: dict[str, Any] = HEADS | {"head_dim": 32}
NORMED: dict[str, Any] = HEAD | {"qk_norm": "head"}
OWN, THEIRS = "vllm serve out", "vllm serve out --model-impl transformers"
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
    "experts": ({"attention": HEAD, "ffn": EXPERTS}, OWN),
    "experts of geglu": (
        {"attention": HEAD, "ffn": EXPERTS | {"expert": EXPERT | {"activation": "gelu"}}},
        "its MixtralForCausalLM has no model.ffn.expert.activation=gelu, and there it must be silu",
    ),
    "weights of experts that add up to 1": (
        {"d_model": 128, "attention": HEADS | {"qk_norm": "full"}, "ffn": EXPERTS},
        "its OlmoeForCausalLM has no model.ffn.router.normalize=true, and there it must be false",
    ),
    "latent attention": ({"attention": MLA, "ffn": DEEP, "position": ROPE | {"interleaved": True}}, OWN),
    "latent attention whose halves rotate": (
        {"attention": MLA, "ffn": DEEP},
        "its DeepseekV3ForCausalLM has no model.position.interleaved=false, and there it must be true",
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
    assert known.keys() >= {*vllm.ABSENT, *vllm.ALLOWED, *vllm.DENSE, *vllm.SQUARE}
    assert vllm.ALLOWED.keys() >= set(vllm.DENSE)
    classes = [getattr(transformers, known[name].architecture) for name in vllm.DENSE]
    assert len(classes) > 10
    assert all(cls.is_backend_compatible() or cls._can_set_attn_implementation() for cls in classes)
