"""OLMo Hybrid."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.olmo_hybrid import FAMILY  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.nn.mixers.gated_delta import GatedDeltaConfig  # noqa: E402
from lm.nn.transformer import build_model  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 6,
    "max_position_embeddings": 128, "pad_token_id": None, "eos_token_id": None,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "no positions, heads of keys that are shared": {
        "rope_parameters": {"rope_type": "default", "rope_theta": None}, "num_key_value_heads": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    },
    "rotated and stretched, attention first, biases, tied, no negative eigenvalues": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}, "attention_bias": True, "tie_word_embeddings": True,
        "layer_types": ["full_attention", "linear_attention"] * 2, "linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_olmo_hybrid(case: str, tmp_path: Path) -> None:
    verify(transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**SIZES | deepcopy(CASES[case]))), tmp_path)


def test_an_olmo_hybrid_of_class_defaults_is_understood() -> None:
    """Those of the 7B; its own file says that nothing is rotated."""
    there = {**transformers.OlmoHybridConfig().to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": None}}
    cfg = FAMILY.config(there)
    assert isinstance(cfg.recurrent, GatedDeltaConfig) and (cfg.recurrent.k_dim, cfg.recurrent.v_dim) == (96, 192)
    assert cfg.position.kind == "none" and cfg.pattern == ["recurrent"] * 3 + ["attention"]
    assert unheard("config.json", there, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []
    short = FAMILY.config({key: there[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
                          | {"num_hidden_layers": 3, "max_position_embeddings": 128})  # fmt: skip
    assert short.position.kind == "rope" and short.pattern == ["recurrent", "recurrent", "attention"]
    assert short.recurrent == cfg.recurrent
    with pytest.raises(ConfigError, match="layers have attention alone, and olmo_hybrid needs both kinds"):
        FAMILY.config({**there, "layer_types": ["full_attention"] * 32})
    with pytest.raises(ConfigError, match="hidden_act='gelu' is of the convolutions too"):
        FAMILY.config({**there, "hidden_act": "gelu"})


def test_a_base_in_the_older_section_rotates(tmp_path: Path) -> None:
    """Seen to fail: rope_theta is null beside it, so that nothing was rotated."""
    case = SIZES | {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}
    model = transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**case))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    older = {**config, "rope_theta": None, "rope_scaling": config.pop("rope_parameters")}
    del older["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(older))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(2, 40)[None]
    found = read_hf(tmp_path)
    ours = build_model(found.config, seed=0).eval()
    ours.load_state_dict(found.weights, strict=False)
    with torch.no_grad():
        expected = again(ids).logits
        torch.testing.assert_close(ours(ids), expected, atol=1e-4 * float(expected.std()), rtol=0.0)
