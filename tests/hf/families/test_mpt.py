"""MPT."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.families.mpt import FAMILY  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, verify  # noqa: E402

BASE: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 128}
CASES: dict[str, dict[str, Any]] = {
    "six heads": {},
    "four heads, untied, a scale of scores": {
        "n_heads": 4, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3, "attn_config": {"softmax_scale": 0.3},
    },
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["MPTForCausalLM"], "attn_config": ATTENTION, "d_model": 4096, "emb_pdrop": 0, "embedding_fraction": 1.0,
    "expansion_ratio": 4, "init_config": {"name": "kaiming_normal_"}, "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None,
    "max_seq_len": 2048, "model_type": "mpt", "n_heads": 32, "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b", "use_cache": False, "verbose": 0, "vocab_size": 50432,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_mpt(case: str, tmp_path: Path) -> None:
    verify(transformers.MptForCausalLM(transformers.MptConfig(**BASE | CASES[case])), tmp_path)


def test_a_config_of_published_sizes_is_understood() -> None:
    """The sizes of the 7B."""
    cfg = FAMILY.config(PUBLISHED)
    assert unheard("config.json", PUBLISHED, FAMILY, cfg) == [] and FAMILY.homeless(cfg) == []


@pytest.mark.parametrize(("key", "value"), [("clip_qkv", 6.0), ("alibi", False), ("qk_ln", True), ("alibi_bias_max", 16)])
def test_other_attention_is_refused(key: str, value: object) -> None:
    """The first is StoryWriter's, the second MPT-1B's; of others transformers' class would know nothing."""
    with pytest.raises(ConfigError, match=f"attn_config: {key}={value} has no place in lm's mpt"):
        FAMILY.config(PUBLISHED | {"attn_config": ATTENTION | {key: value}})


def test_biases_are_refused() -> None:
    hf = PUBLISHED | {"no_bias": False}
    with pytest.raises(ConfigError, match="no_bias=False has no place in lm's mpt, which has True"):
        unheard("config.json", hf, FAMILY, FAMILY.config(hf))
