"""GPT-J and CodeGen."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.gptj import FAMILY  # noqa: E402
from lm.hf.io.family import families  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 6}
CASES: dict[str, dict[str, Any]] = {
    "half of a head": {},
    "all of a head, tied, another feed-forward": {
        "rotary_dim": 12, "tie_word_embeddings": True, "n_inner": 72, "activation_function": "gelu", "layer_norm_epsilon": 1e-3,
    },
    "a part that is no round fraction": {"n_embd": 94, "n_head": 2},
}  # fmt: skip
PUBLISHED: dict[str, Any] = {  # of the 6B
    "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0, "embd_pdrop": 0.0,
    "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048,
    "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64, "scale_attn_weights": True, "tie_word_embeddings": False, "vocab_size": 50400,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_gptj(case: str, tmp_path: Path) -> None:
    verify(transformers.GPTJForCausalLM(transformers.GPTJConfig(**BASE | CASES[case])), tmp_path)


@pytest.mark.parametrize("changes", [{}, {"n_head": 8, "tie_word_embeddings": True, "n_inner": 72}], ids=str)
def test_codegen(changes: dict[str, Any], tmp_path: Path) -> None:
    verify(transformers.CodeGenForCausalLM(transformers.CodeGenConfig(**BASE | changes)), tmp_path)


def test_heads_of_codegen_are_a_multiple_of_four() -> None:
    with pytest.raises(ConfigError, match="n_head=6 is no multiple of 4"):
        families()["codegen"].config(BASE | {"n_head": 6})


def test_a_config_of_published_sizes_is_understood() -> None:
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []


def test_a_rotation_that_its_table_does_not_have_is_refused() -> None:
    cfg = FAMILY.config(PUBLISHED)
    other = cfg.replace(position=cfg.position.replace(theta=500.0))
    assert FAMILY.homeless(other) == ["model.position.theta=500.0 must be 10000.0"]
    with pytest.raises(ConfigError, match=r"rope_theta=500\.0 means something in"):
        unheard("config.json", PUBLISHED | {"rope_theta": 500.0}, FAMILY, cfg)
    with pytest.raises(ConfigError, match="rotates 5 dimensions"):
        FAMILY.config(PUBLISHED | {"rotary_dim": 5})
