"""T5 1.0 and 1.1, and mT5."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lm.hf.io.family import families  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, logits_agree, ours_of, redraw, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 48, "d_kv": 10, "d_ff": 72, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 5,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "1.0": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 3},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_t5(case: str, tmp_path: Path) -> None:
    verify(
        transformers.T5ForConditionalGeneration(transformers.T5Config(**BASE | CASES[case])),
        tmp_path,
        embed_gain=8.0 if case == "1.0" else 1.0,
    )


@torch.no_grad()
def test_t5_1_1_with_a_head_of_its_own(tmp_path: Path) -> None:
    """As published: the head is stored beside the embedding, and config.json says so."""
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**BASE | CASES["1.1"]))
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.shared.weight))
    theirs.config.tie_word_embeddings = False
    found = verify(theirs, tmp_path, embed_gain=1.0)
    assert not found.config.head.tied


def test_t5_1_1_as_transformers_5_saves_it_again(tmp_path: Path) -> None:
    """It says that the head is tied, stores the matrix of its own all the same, and reads it."""
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**BASE | CASES["1.1"]))
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.shared.weight))
    theirs.config.tie_word_embeddings = False
    theirs.save_pretrained(tmp_path / "published")
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "published")
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"]
    assert torch.equal(read_hf(tmp_path / "again").weights["head.weight"], theirs.lm_head.weight)


@torch.no_grad()
@pytest.mark.parametrize("said", [{}, {"scale_decoder_outputs": True}])
def test_an_untied_head_without_a_matrix_is_the_embedding_over_plain_states(said: dict[str, bool], tmp_path: Path) -> None:
    """As transformers 5 reads it. Seen to fail: the file was refused, for a matrix of the head that is missing."""
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**BASE))
    redraw(theirs, embed_gain=8.0 if said else 1.0)
    theirs.save_pretrained(tmp_path)
    kept = {key: value for key, value in json.loads((tmp_path / "config.json").read_text()).items() if key != "scale_decoder_outputs"}
    (tmp_path / "config.json").write_text(json.dumps({**kept, "tie_word_embeddings": False, **said}))
    found = read_hf(tmp_path)
    assert found.config.head.tied
    logits_agree(transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval(), ours_of(found))


@pytest.mark.parametrize("own_head", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_mt5(own_head: bool, tmp_path: Path) -> None:
    """Published files have a head of their own; one that transformers 5 has made has none, and its states are not scaled either."""
    theirs = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**BASE))
    if own_head:
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.shared.weight))
        theirs.config.tie_word_embeddings = False
    found = verify(theirs, tmp_path, embed_gain=1.0)
    assert found.config.head.tied is not own_head and found.config.head.scale == 1.0


def test_a_config_of_mt5s_published_sizes_is_understood() -> None:
    """google/mt5-small's, as its file has it; an export goes back to it, and of a model that comes from no family to T5."""
    there: dict[str, Any] = {
        "architectures": ["MT5ForConditionalGeneration"], "d_ff": 1024, "d_kv": 64, "d_model": 512, "decoder_start_token_id": 0,
        "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu", "initializer_factor": 1.0, "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06, "model_type": "mt5", "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "pad_token_id": 0,
        "relative_attention_num_buckets": 32, "tie_word_embeddings": False, "tokenizer_class": "T5Tokenizer", "use_cache": True,
        "vocab_size": 250112,
    }  # fmt: skip
    family = families()["mt5"]
    cfg = family.config(there)
    assert cfg == families()["t5"].config(there) and unheard("config.json", there, family, cfg) == [] and family.homeless(cfg) == []
    assert family_for(cfg, imported="mt5").name == "mt5" and family_for(cfg, imported=None).name == "t5"
