"""DeepSeek-V3."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

transformers = pytest.importorskip("transformers")

from lm.errors import CheckpointError, ConfigError  # noqa: E402
from lm.hf.families.deepseek_v3 import FAMILY  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.writing import family_for, write_hf  # noqa: E402
from lm.nn.batch import Batch  # noqa: E402
from lm.nn.mtp import shifted  # noqa: E402
from lm.nn.transformer import DecoderConfig, DecoderLM  # noqa: E402
from lm.testing.models import Doubles, same  # noqa: E402
from tests.hf.harness import VOCAB, cases, in_doubles, old_spelling_agrees, ours_of, redraw, tokens, verify  # noqa: E402
from tests.nn.models import redrawn  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 9, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "max_position_embeddings": 128, "routed_scaling_factor": 1.7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0,
    "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
PUBLISHED_EXTRAS = (
    "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "groups": {},
    "no query latent, biases, halves": {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False, "n_shared_experts": 2},
    "query latent with biases": {"attention_bias": True, "norm_topk_prob": False, "tie_word_embeddings": True},
    "yarn": {"rope_parameters": YARN},
    "yarn, one mscale": {"rope_parameters": {key: value for key, value in YARN.items() if key != "mscale"}, "n_group": 1, "topk_group": 1},
    "experts everywhere": {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_deepseek_v3(case: str, tmp_path: Path) -> None:
    verify(transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("scaling", [None, {"type": "yarn", **{key: value for key, value in YARN.items() if not key.startswith("rope")}}])
def test_deepseek_v3_of_transformers_4(scaling: dict[str, Any] | None) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")} | {"num_hidden_layers": 5}
    old = {"max_position_embeddings": 128, "rope_theta": 500, "rope_scaling": scaling, "num_key_value_heads": 5}
    old_spelling_agrees(FAMILY, transformers.DeepseekV3Config, sizes | old)


def published(folder: Path, depth: int, **changes: Any) -> DecoderLM:
    """A redrawn model of ours, and beside it the folder that it becomes."""
    model = redrawn(FAMILY.config(BASE | {"num_nextn_predict_layers": depth} | changes))
    assert isinstance(model, DecoderLM)
    write_hf(folder, FAMILY, model.cfg, dict(model.named_parameters()), None)
    return model


@pytest.mark.parametrize("depth, tied", [(1, False), (2, True)])
def test_layers_that_predict_further_tokens_come_back_bit_for_bit(tmp_path: Path, depth: int, tied: bool) -> None:
    model = published(tmp_path / "hf", depth, tie_word_embeddings=tied)
    stored = load_file(tmp_path / "hf/model.safetensors")
    beyond = {f"model.layers.{3 + k}" for k in range(depth)}
    for there in beyond:
        keys = {key.removeprefix(f"{there}.") for key in stored if key.startswith(f"{there}.")}
        assert {key for key in keys if not key.startswith(("self_attn.", "mlp."))} == {f"{name}.weight" for name in PUBLISHED_EXTRAS}
        assert torch.equal(stored[f"{there}.embed_tokens.weight"], model.embed.weight)
        assert torch.equal(stored[f"{there}.shared_head.head.weight"], model.head.weight)
    found = read_hf(tmp_path / "hf")
    assert found.config == model.cfg and not found.notes
    ours = dict(model.named_parameters())
    assert found.weights.keys() == ours.keys() and all(torch.equal(found.weights[name], ours[name]) for name in ours)


@torch.no_grad()
def test_transformers_predicts_the_same_further_tokens(tmp_path: Path) -> None:
    from transformers.modeling_layers import MtpModel

    published(tmp_path / "hf", 2)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and all(key.startswith(("model.layers.3.", "model.layers.4.")) for key in report["unexpected_keys"])
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34].*"]  # it knows those of the published 61 layers
    further = MtpModel.from_pretrained(theirs.eval()).double()
    further.config._experts_implementation = "eager"  # its grouped kernel has no float64
    theirs, model = in_doubles(theirs), ours_of(read_hf(tmp_path / "hf"))
    further.tie_with_main_model(theirs)
    ids, at = tokens(2, 30, seed=3), torch.arange(30)[None]
    found: list[Tensor] = []
    with Doubles():
        model.train()(Batch(ids), read=lambda hidden, head, ctx: found.extend(head(h) for h in [hidden, *ctx.mtp]))
        hidden = theirs.model(ids).last_hidden_state
        same(found[0], theirs.lm_head(hidden))
        for k in range(2):
            hidden = further.forward_layer(k, hidden, at, None, input_ids=shifted(ids, k + 1, 0))
            expected = theirs.lm_head(hidden)
            assert expected.std() > 1
            same(found[k + 1], expected)


def test_layers_that_predict_further_tokens_are_left_out_where_they_do_not_fit(tmp_path: Path) -> None:
    published(tmp_path / "hf", 1)
    file = tmp_path / "hf/model.safetensors"
    stored = load_file(file)
    lost, other = ({**stored}, {**stored, "model.layers.3.embed_tokens.weight": torch.ones(VOCAB, 48)})
    del lost["model.layers.3.eh_proj.weight"]
    for weights, reason in ((lost, "1 tensors are missing (model.layers.3.eh_proj.weight)"), (other, "are not equal")):
        save_file(weights, file)
        found = read_hf(tmp_path / "hf")
        assert isinstance(found.config, DecoderConfig) and found.config.mtp is None
        assert not any(name.startswith("mtp.") for name in found.weights)
        assert any("left out: 1 layer for further tokens" in note and reason in note for note in found.notes)


def test_layers_beyond_those_that_config_json_names_are_refused(tmp_path: Path) -> None:
    transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**BASE)).save_pretrained(tmp_path)
    found = read_hf(tmp_path)
    assert isinstance(found.config, DecoderConfig) and found.config.mtp is None and not found.notes
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.4.eh_proj.weight": torch.ones(3, 3)}, file)
    with pytest.raises(CheckpointError, match=r"not known.*model\.layers\.4\.eh_proj"):
        read_hf(tmp_path)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_the_scale_that_yarn_asks_for_is_told(scale: float | None) -> None:
    cfg = FAMILY.config(BASE | {"rope_parameters": YARN})
    assert cfg.attention.scale is not None
    with pytest.raises(ConfigError, match=f"in deepseek_v3, .* model.attention.scale=.* must be {cfg.attention.scale}. Train"):
        family_for(cfg.replace(attention=cfg.attention.replace(scale=scale)))
    assert family_for(cfg) is not None


def test_the_correction_bias_stays_float32_beside_bf16_matrices(tmp_path: Path) -> None:
    theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**BASE))
    redraw(theirs, 1.0)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    save_file({key: tensor if key.endswith("correction_bias") else tensor.bfloat16() for key, tensor in stored.items()}, file)
    weights = read_hf(tmp_path).weights
    assert weights["blocks.1.ffn.router.weight"].dtype == torch.bfloat16
    assert torch.equal(weights["blocks.1.ffn.router.correction_bias"], stored["model.layers.1.mlp.gate.e_score_correction_bias"])


@pytest.mark.parametrize("key, value", [("n_shared_experts", 0), ("n_group", 8)])
def test_what_transformers_cannot_run_is_refused_by_name(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{key}={value}"):
        FAMILY.config(BASE | {key: value})
