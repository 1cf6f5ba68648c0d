"""GLM-4.5."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.glm4_moe import FAMILY  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.writing import family_for, write_hf  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.nn.batch import Batch  # noqa: E402
from lm.nn.mtp import shifted  # noqa: E402
from lm.testing.models import Doubles, same  # noqa: E402
from tests.hf.harness import VOCAB, cases, in_doubles, old_spelling_agrees, ours_of, tokens, verify  # noqa: E402
from tests.nn.models import redrawn  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "max_position_embeddings": 128, "routed_scaling_factor": 1.7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "norms on heads, half of a head": {"use_qk_norm": True},
    "groups, biases, experts everywhere, tied": {
        "attention_bias": True, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "n_shared_experts": 2,
        "tie_word_embeddings": True,
    },
    "all of a head, weights as they are": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}, "norm_topk_prob": False,
    },
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
    "topk_group": 1, "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=2))
def test_glm4_moe(case: str, tmp_path: Path) -> None:
    verify(transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("more", [{}, {"rope_theta": 500.0, "use_qk_norm": True, "partial_rotary_factor": 0.25, "head_dim": 16}])
def test_glm4_moe_of_transformers_4(more: dict[str, Any]) -> None:
    sizes = {key: BASE[key] for key in ("vocab_size", "num_hidden_layers", "max_position_embeddings")}
    old_spelling_agrees(FAMILY, transformers.Glm4MoeConfig, sizes | {"hidden_size": 64, "num_attention_heads": 8} | more)


def test_a_config_of_published_sizes_is_understood() -> None:
    """The sizes of GLM-4.5-Air in the spelling of transformers 4."""
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []


@torch.no_grad()
def test_transformers_predicts_the_same_further_token(tmp_path: Path) -> None:
    """The layer behind the last comes back bit for bit, and computes what it does there."""
    from transformers.modeling_layers import MtpModel

    model = redrawn(FAMILY.config(BASE | {"use_qk_norm": True}))
    weights = dict(model.named_parameters())
    write_hf(tmp_path, family_for(model.cfg, "glm4_moe"), model.cfg, weights, None)
    found = read_hf(tmp_path)
    assert found.config == model.cfg and found.weights.keys() == weights.keys() and not found.notes
    assert "mtp.0.join.weight" in weights and all(torch.equal(found.weights[name], weights[name]) for name in weights)

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and all(key.startswith("model.layers.3.") for key in report["unexpected_keys"])
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]  # it knows those of the published 46 and 92 layers
    further = MtpModel.from_pretrained(theirs.eval()).double()
    further.config._experts_implementation = "eager"  # its grouped kernel has no float64
    theirs, ours = in_doubles(theirs), ours_of(found)
    further.tie_with_main_model(theirs)
    ids, logits = tokens(2, 30, seed=3), list[Tensor]()
    with Doubles():
        ours.train()(Batch(ids), read=lambda hidden, head, ctx: logits.extend(head(h) for h in [hidden, *ctx.mtp]))
        hidden = theirs.model(ids).last_hidden_state
        same(logits[0], theirs.lm_head(hidden))
        hidden = further.forward_layer(0, hidden, torch.arange(30)[None], None, input_ids=shifted(ids, 1, 0))
        expected = theirs.lm_head(hidden)
        assert expected.std() > 1
        same(logits[1], expected)


def test_norms_over_all_heads_together_are_refused_by_name() -> None:
    cfg = FAMILY.config(BASE | {"use_qk_norm": True})
    with pytest.raises(ConfigError, match=r"model\.attention\.qk_norm=full must be none"):
        family_for(cfg.replace(attention=cfg.attention.replace(qk_norm="full")), "glm4_moe")
