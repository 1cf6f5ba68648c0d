"""Switch Transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.errors import ConfigError
from lm.hf.families.switch_transformers import FAMILY
from lm.hf.io.reading import CONFIG, read_hf
from lm.nn.batch import Batch
from lm.nn.model_config import model_config
from lm.nn.transformer import EncoderDecoderConfig

transformers = pytest.importorskip("transformers")

from tests.hf.harness import LENGTH, VOCAB, cases, ours_of, tokens, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 48, "d_kv": 10, "d_ff": 72, "num_layers": 4, "num_sparse_encoder_layers": 2,
    "num_decoder_layers": 2, "num_sparse_decoder_layers": 1, "num_heads": 5, "num_experts": 3, "expert_capacity": 6,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "every second layer": {},
    "every layer, router bias, untied": {
        "num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 2, "router_bias": True, "tie_word_embeddings": False,
        "dense_act_fn": "gelu", "num_experts": 4,
    },
}  # fmt: skip
RIGHT = (False, False, False)  # in transformers padding takes places of an expert, on the left before the row's own tokens


@torch.no_grad()
@pytest.mark.parametrize("case", cases(CASES))
def test_switch(case: str, tmp_path: Path) -> None:
    theirs = transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(**BASE | CASES[case]))
    found = verify(theirs, tmp_path, lefts=RIGHT, embed_gain=8.0 if not CASES[case] else 1.0)
    cfg = found.config
    assert isinstance(cfg, EncoderDecoderConfig)
    assert cfg.ffn.kind == "moe"
    roomy = ours_of(replace(found, config=cfg.replace(ffn=cfg.ffn.replace(capacity=None))))
    batch = Batch(tokens(3, 23, 1), source_tokens=tokens(3, LENGTH, 2))
    assert not torch.allclose(roomy(batch), ours_of(found)(batch), rtol=0, atol=0.1), "no token was dropped"


def test_missing_keys_are_those_of_switch_base_8(tmp_path: Path) -> None:
    theirs = transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(**BASE))
    theirs.save_pretrained(tmp_path)
    keys = ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "num_experts", "num_layers", "num_decoder_layers")
    few = {key: BASE[key] for key in (*keys, "num_sparse_encoder_layers", "num_sparse_decoder_layers", "relative_attention_num_buckets")}
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "switch_transformers", **few}), encoding="utf-8")
    cfg = read_hf(tmp_path).config
    assert cfg.ffn.kind == "moe"
    assert (cfg.ffn.capacity, cfg.ffn.balance_loss, cfg.ffn.expert.activation) == (64, 0.001, "relu")


@pytest.mark.parametrize("sparse", [(1, 1), (4, 1), (0, 0)])
def test_experts_in_other_layers_have_no_place(sparse: tuple[int, int], tmp_path: Path) -> None:
    layers = {"num_sparse_encoder_layers": sparse[0], "num_sparse_decoder_layers": sparse[1]}
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "switch_transformers", **BASE, **layers}), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"num_sparse_encoder_layers={sparse[0]} of 4 .* no place"):
        read_hf(tmp_path)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"ffn": {"capacity": None}}, "ffn.capacity=null must be 64"),
        ({"head": {"scale": 1.0}}, "head.scale=1.0"),
        ({"head": {"tied": False}}, "head.scale=0.14"),
        ({"n_layers": 3}, "num_sparse_decoder_layers=1 of 3"),
    ],
)
def test_options_without_a_place_are_named(changes: dict[str, Any], option: str) -> None:
    tree = FAMILY.config(BASE).tree()
    merged = {key: {**tree[key], **value} if isinstance(value, dict) else value for key, value in changes.items()}
    [found] = FAMILY.homeless(model_config({**tree, **merged}))
    assert option in found
