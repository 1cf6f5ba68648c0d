"""UMT5."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.hf.families.umt5 import FAMILY

transformers = pytest.importorskip("transformers")

from lm.errors import ConfigError  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.writing import family_for  # noqa: E402
from lm.hf.options.keys import unheard  # noqa: E402
from tests.hf.harness import VOCAB, cases, greedy_agrees, logits_agree, ours_of, redraw, tokens, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 48, "d_kv": 10, "d_ff": 72, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 5,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "relu, another start": {"feed_forward_proj": "relu", "decoder_start_token_id": 3, "layer_norm_epsilon": 1e-3},
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["UMT5ForConditionalGeneration"], "classifier_dropout": 0.0, "d_ff": 1024, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dense_act_fn": "gelu_new", "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0, "is_encoder_decoder": True, "is_gated_act": True, "layer_norm_epsilon": 1e-06, "model_type": "umt5",
    "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "pad_token_id": 0, "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32, "scalable_attention": True, "tie_word_embeddings": False, "tokenizer_class": "T5Tokenizer",
    "use_cache": True, "vocab_size": 256384,
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES))
def test_umt5(case: str, tmp_path: Path) -> None:
    found = verify(transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**BASE | CASES[case])), tmp_path, embed_gain=8.0)
    assert found.weights["encoder.position.table.weight"].shape == (3 * 8, 5) and found.config.head.tied


@torch.no_grad()
def test_a_head_of_its_own_is_read_as_it_was_trained_and_not_written(tmp_path: Path) -> None:
    """transformers before 5.24, which loads the same file, divides its logits by sqrt(d_model)."""
    theirs = transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**BASE)).eval()
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.shared.weight))
    scales = not hasattr(theirs.config, "scale_decoder_outputs")
    theirs.config.tie_word_embeddings = theirs.config.scale_decoder_outputs = False
    redraw(theirs, embed_gain=1.0)
    theirs.save_pretrained(tmp_path)
    ours = ours_of(found := read_hf(tmp_path))
    assert not found.config.head.tied and found.config.head.scale == 1.0
    logits_agree(theirs, ours)
    greedy_agrees(theirs, ours)
    inputs = {"input_ids": tokens(1, 9, seed=5), "decoder_input_ids": tokens(1, 5, seed=6)}
    loaded = transformers.UMT5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**inputs).logits * (48**0.5 if scales else 1.0), theirs(**inputs).logits)
    with pytest.raises(ConfigError, match=r"model\.head\.tied=false must be true, since transformers 5.0 to 5.23 scales"):
        family_for(found.config, "umt5")


@torch.no_grad()
@pytest.mark.parametrize("said", [{}, {"scale_decoder_outputs": True}])
def test_an_untied_head_without_a_matrix_is_the_embedding_over_plain_states(said: dict[str, bool], tmp_path: Path) -> None:
    """Seen to fail: the states were scaled, and transformers from 5.24 on does not."""
    theirs = transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**BASE)).eval()
    if not hasattr(theirs.config, "scale_decoder_outputs"):
        pytest.skip("before 5.24 all states are scaled")
    redraw(theirs, embed_gain=8.0 if said else 1.0)
    theirs.save_pretrained(tmp_path)
    kept = {key: value for key, value in json.loads((tmp_path / "config.json").read_text()).items() if key != "scale_decoder_outputs"}
    (tmp_path / "config.json").write_text(json.dumps({**kept, "tie_word_embeddings": False, **said}))
    found = read_hf(tmp_path)
    assert found.config.head.tied
    logits_agree(transformers.UMT5ForConditionalGeneration.from_pretrained(tmp_path).eval(), ours_of(found))


@pytest.mark.parametrize("scaled", [True, False])
def test_what_a_config_says_of_scaled_states_is_heard(scaled: bool) -> None:
    """transformers writes it from 5.24 on. Seen to be refused as a key of other families."""
    there = PUBLISHED | {"tie_word_embeddings": True, "scale_decoder_outputs": scaled}
    cfg = FAMILY.config(there)
    assert all("scalable_attention" in note for note in unheard("config.json", there, FAMILY, cfg))
    assert cfg.head.tied and cfg.head.scale == (512**-0.5 if scaled else 1.0)


def test_a_config_of_published_sizes_is_understood() -> None:
    """google/umt5-small's."""
    cfg = FAMILY.config(FAMILY.as_stored(PUBLISHED, {"lm_head.weight"}))
    assert all("scalable_attention" in note for note in unheard("config.json", PUBLISHED, FAMILY, cfg))
    assert not cfg.head.tied and cfg.n_layers == 8
