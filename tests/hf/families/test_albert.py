"""ALBERT, ELECTRA and OPT 350M, whose embeddings are narrower than the model."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lm.data.rows.labelled import with_labels  # noqa: E402
from lm.errors import ConfigError  # noqa: E402
from lm.hf.io.check import compare  # noqa: E402
from lm.hf.io.family import families, resolved  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.writing import family_for, write_hf  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from lm.testing.models import random_model  # noqa: E402
from tests.hf.harness import LENGTH, VOCAB, cases, change, verify  # noqa: E402

BERT: dict[str, Any] = {
    "vocab_size": VOCAB, "embedding_size": 20, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 100, "max_position_embeddings": LENGTH,
}  # fmt: skip
OPT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 100,
    "max_position_embeddings": 64, "word_embed_proj_dim": 20,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", BERT),
    "electra": ("ElectraForMaskedLM", BERT),
    "opt, norms behind": ("OPTForCausalLM", OPT | {"do_layer_norm_before": False}),
    "albert, two layers in turn, relu": (
        "AlbertForMaskedLM", BERT | {"inner_group_num": 2, "num_hidden_layers": 2, "hidden_act": "relu", "embedding_size": 48},
    ),
    "electra, as wide, three segments": ("ElectraForMaskedLM", BERT | {"embedding_size": 48, "type_vocab_size": 3}),
    "opt, norms in front": ("OPTForCausalLM", OPT),
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "albert": {
        "architectures": ["AlbertForMaskedLM"], "attention_probs_dropout_prob": 0, "bos_token_id": 2, "classifier_dropout_prob": 0.1,
        "down_scale_factor": 1, "embedding_size": 128, "eos_token_id": 3, "gap_size": 0, "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0, "hidden_size": 768, "initializer_range": 0.02, "inner_group_num": 1, "intermediate_size": 3072,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "albert", "net_structure_type": 0,
        "num_attention_heads": 12, "num_hidden_groups": 1, "num_hidden_layers": 12, "num_memory_blocks": 0, "pad_token_id": 0,
        "type_vocab_size": 2, "vocab_size": 30000,
    },
    "electra": {
        "architectures": ["ElectraForMaskedLM"], "attention_probs_dropout_prob": 0.1, "embedding_size": 128, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 256, "initializer_range": 0.02, "intermediate_size": 1024, "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512, "model_type": "electra", "num_attention_heads": 4, "num_hidden_layers": 12, "pad_token_id": 0,
        "summary_activation": "gelu", "summary_last_dropout": 0.1, "summary_type": "first", "summary_use_proj": True,
        "type_vocab_size": 2, "vocab_size": 30522,
    },
    "opt": {
        "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu", "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": False, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 4096,
        "hidden_size": 1024, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt",
        "num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 1, "prefix": "</s>", "vocab_size": 50272,
        "word_embed_proj_dim": 512,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, quick=3))
def test_narrow_embeddings(case: str, tmp_path: Path) -> None:
    architecture, options = CASES[case]
    kind = getattr(transformers, architecture)
    found = verify(kind(kind.config_class(**options)), tmp_path, greedy=architecture.startswith("OPT"))
    assert (found.config.embed.factorized is None) == ("as wide, three" in case)


@pytest.mark.parametrize(("name", "options"), [("albert", BERT), ("electra", BERT), ("opt", OPT)])
def test_a_classifier_of_what_training_starts_from_is_transformers_one(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Seen to fail: ELECTRA's had BERT's tanh before its labels, and OPT's read hidden states before they were narrowed."""
    parent = families()[name].config(options)
    cfg = with_labels(parent, ["a", "b", "c"])
    assert ("head.narrow.weight" in cfg.new_in_head(parent)) == (name != "opt")
    family, model = family_for(cfg, imported=name), random_model(cfg, seed=1)
    assert family.name == name
    write_hf(tmp_path, family, cfg, {key: p.detach() for key, p in model.named_parameters()}, None)
    change(tmp_path, pad_token_id=0)
    found = compare(tmp_path, family, model)
    assert found.spread > 1e-3 and found.difference < 1e-4 * max(1.0, found.spread)
    assert resolved(read_hf(tmp_path).config) == resolved(cfg)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_of_published_sizes_is_understood(name: str) -> None:
    """Of albert-base-v2, electra-small-generator and opt-350m."""
    family = families()[name]
    cfg = family.config(PUBLISHED[name])
    assert unheard("config.json", PUBLISHED[name], family, cfg) == [] and family.homeless(cfg) == []
    assert family_for(cfg).name == name


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("albert", {"num_hidden_groups": 2}, "num_hidden_groups=2, and in lm all passes share their layers"),
        ("opt", {"tie_word_embeddings": False}, "word_embed_proj_dim=512 needs a tied head in lm"),
    ],
)
def test_what_has_no_place_is_refused(name: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        families()[name].config(PUBLISHED[name] | changes)
