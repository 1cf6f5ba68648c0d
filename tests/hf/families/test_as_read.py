"""Keys of config.json that transformers reads in an order, or under names, of its own; what it computes from the same folder is asked."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.io.family import families  # noqa: E402
from lm.hf.io.reading import CONFIG, read_hf  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, logits_agree, ours_of, redraw  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None,
}  # fmt: skip
NEOX = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"} | {"hidden_size": 64}
T5: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 48, "d_kv": 10, "d_ff": 72, "num_layers": 2, "num_heads": 5, "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "finetuned": True}
LISTS = {"short_factor": [1.1, 1.0, 1.3, 1.2, 1.5, 1.4], "long_factor": [1.2, 1.7, 2.1, 3.3, 4.8, 6.5]}
LONG = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 32, **LISTS}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
BY_TYPE = {"full_attention": {**YARN, "rope_theta": 500.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "an original length above that of llama3": ("llama", SIZES, {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64}),
    "one of parameters by type of layer": ("olmo3", SIZES, {"rope_parameters": BY_TYPE, "original_max_position_embeddings": 64}),
    "one above that of yarn, which says finetuned": (
        "mistral", SIZES, {"rope_theta": 500.0, "rope_scaling": YARN, "original_max_position_embeddings": 64},
    ),
    "two scalings": (
        "llama", SIZES, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ),
    "two scalings by type of layer": (
        "olmo3", SIZES, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": BY_TYPE},
    ),
    "phi 3 has one of its own": ("phi3", SIZES, {"rope_parameters": LONG}),
    "longrope under the name of yarn": (
        "phi3", SIZES, {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", **LISTS}, "original_max_position_embeddings": 32},
    ),
    "gpt-neox, a base of other families": ("gpt_neox", NEOX, {"rope_theta": 500.0}),
    "gpt-neox, a part of other families": ("gpt_neox", NEOX, {"partial_rotary_factor": 0.5}),
    "gpt-neox, its own beside rotary parameters": (
        "gpt_neox", NEOX,
        {"rotary_emb_base": 90, "rotary_pct": 1.0, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "modernbert, half a window": ("modernbert", NEOX, {"local_attention": 64, "sliding_window": 3}),
    "t5, another activation": ("t5", T5, {"dense_act_fn": "gelu_new"}),
    "t5, gated by the exact gelu": ("t5", T5 | {"feed_forward_proj": "gated-gelu"}, {"dense_act_fn": "gelu"}),
    "qwen3-next, swish": (
        "qwen3_next",
        SIZES | {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "num_experts": 5, "num_experts_per_tok": 2,
                 "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6,
                 "linear_value_head_dim": 10},
        {"hidden_act": "swish"},
    ),
}  # fmt: skip


def folder_of(name: str, options: dict[str, Any], said: dict[str, Any], folder: Path) -> Any:
    """Writes a folder whose config.json says this, without what transformers has made of its rotary keys; returns what it loads of it."""
    family = families()[name]
    config = transformers.CONFIG_MAPPING[name](**options)
    written = getattr(transformers, family.architecture)(config)
    redraw(written, 2.0)
    written.save_pretrained(folder)
    keys = ("rope_parameters", "original_max_position_embeddings", "partial_rotary_factor", "dense_act_fn")
    told = {key: value for key, value in json.loads((folder / CONFIG).read_text()).items() if key not in keys}
    (folder / CONFIG).write_text(json.dumps(told | said))
    return getattr(transformers, family.auto).from_pretrained(folder).eval()


@torch.no_grad()
@pytest.mark.parametrize("case", cases(CASES, quick=len(CASES)))
def test_the_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, options, said = CASES[case]
    theirs = folder_of(name, options, said, tmp_path)
    found = read_hf(tmp_path)
    logits_agree(theirs, ours_of(found), spread=0.3)
    assert found.family.homeless(found.config) == []


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "olmo 3, only the old name of a type": (
        "olmo3", SIZES | {"rope_scaling": YARN}, r"rope_scaling has type='yarn' and no rope_type, .* Write rope_type\.",
    ),
    "olmo 3, a scaling of layers with a window": (
        "olmo3", SIZES | {"rope_parameters": {"sliding_attention": YARN}}, "layers with a window have rope_type='yarn'",
    ),
    "olmo 3, rotary parameters that are not by type of layer": (  # seen to fail: they were read, and transformers took its own
        "olmo3", SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rope_parameters are not by type of layer",
    ),
    "gemma 3, a scaling that is not by type of layer": (
        "gemma3_text", SIZES | {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}, "Write them so",
    ),
    "modernbert, a scaling of all layers": (
        "modernbert", SIZES | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is of layers with a window too",
    ),
    "llama, rotary parameters by type of layer": (  # seen to fail: those of both types were read, and transformers took none of them
        "llama", SIZES | {"rope_parameters": {f"{kind}_attention": LINEAR for kind in ("full", "sliding")}},
        r"told by type of layer \(full_attention, sliding_attention\), .* does not look at them",
    ),
    "gpt-oss, the same": ("gpt_oss", SIZES | {"rope_parameters": {"full_attention": LINEAR}}, r"told by type of layer \(full_attention\)"),
    "phi 3, yarn without lists": ("phi3", SIZES | {"rope_scaling": YARN}, "rope_type='yarn' is not one that phi3 has"),
    "nanochat, a scaling that its norms undo": (
        "nanochat", SIZES | {"rope_theta": 500.0, "rope_scaling": YARN}, r"rope_type=yarn makes queries and keys 1.139 times as long",
    ),
    "olmo 1, clipped queries, keys and values": ("olmo", SIZES | {"clip_qkv": 8.0}, r"clip_qkv=8\.0 has no place in lm's olmo"),
    "qwen 3, a kind of layer that is not known": (
        "qwen3", SIZES | {"layer_types": ["chunked_attention"] * 4}, "chunked_attention.* is not a window in all layers but every n-th",
    ),
    "t5, an activation that is not known": ("t5", T5 | {"dense_act_fn": "tanh"}, "dense_act_fn='tanh' is not known"),
    "mamba 2, weights that transformers divides": (
        "mamba2", {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 16, "n_groups": 2,
                   "rescale_prenorm_residual": True}, "rescale_prenorm_residual=True has no place in lm's mamba2",
    ),
    "deepseek v3, no number of groups": (
        "deepseek_v3", SIZES | {"n_group": None}, "n_group is null, and transformers computes with a number. Write 1",
    ),
    "deepseek v2, no number of groups": (
        "deepseek_v2",
        SIZES | {"num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": None},
        "topk_group is null",
    ),
}  # fmt: skip


def test_rotary_parameters_that_say_nothing_new_need_not_be_by_type_of_layer() -> None:
    plain = families()["gemma3_text"].config(SIZES)
    assert families()["gemma3_text"].config(SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}) == plain


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_would_not_compute_is_refused_by_name(case: str) -> None:
    name, hf, said = REFUSED[case]
    family = families()[name]
    with pytest.raises(ConfigError, match=said):
        unheard("config.json", hf, family, family.config(hf))
