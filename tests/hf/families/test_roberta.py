"""RoBERTa."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.data.kinds import BytesConfig
from lm.errors import ConfigError
from lm.hf.families.roberta import FAMILY
from lm.hf.io.check import compare
from lm.hf.io.files import SINGLE
from lm.hf.io.reading import read_hf
from lm.hf.io.writing import write_hf
from lm.nn.batch import Batch

transformers = pytest.importorskip("transformers")

from lm.testing.models import Doubles, random_model, same  # noqa: E402
from tests.hf.harness import LENGTH, VOCAB, cases, in_doubles, ours_of, padding, redraw, tokens, verify  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 100,
    "max_position_embeddings": LENGTH + 2, "type_vocab_size": 1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "relu, three segments": {"hidden_act": "relu", "layer_norm_eps": 1e-5, "type_vocab_size": 3},
}


@pytest.mark.parametrize("case", cases(CASES))
def test_roberta(case: str, tmp_path: Path) -> None:
    found = verify(transformers.RobertaForMaskedLM(transformers.RobertaConfig(**BASE | CASES[case])), tmp_path, greedy=False)
    assert found.config.max_seq_len == LENGTH


@pytest.mark.slow
@torch.no_grad()
def test_positions_that_transformers_counts_by_itself_are_ours(tmp_path: Path) -> None:
    """From ids that are padded on either side with the padding token, and no positions."""
    theirs = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**BASE)).eval()
    ours, ids = ours_of(verify(theirs, tmp_path, greedy=False)), tokens(3, LENGTH, 7).clamp_min(FAMILY.pad + 1)
    for left in (False, True):
        real, positions = padding(3, LENGTH, left)
        with Doubles():
            expected = in_doubles(theirs)(ids.masked_fill(~real, FAMILY.pad), attention_mask=real.long()).logits
            same(ours(Batch(ids, positions=positions))[real], expected[real])


@pytest.mark.slow
@torch.no_grad()
def test_a_published_file_imports_and_what_is_exported_of_it_is_compared(tmp_path: Path) -> None:
    """With a pooler, the head stored beside the embedding, and its bias twice; a padding token among random ids would move the others."""
    theirs = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**BASE))
    redraw(theirs, embed_gain=2.0)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    pooler = {"roberta.pooler.dense.weight": torch.ones(48, 48), "roberta.pooler.dense.bias": torch.ones(48)}
    head = {"lm_head.decoder.bias": tensors["lm_head.bias"].clone()}
    head |= {"lm_head.decoder.weight": tensors["roberta.embeddings.word_embeddings.weight"].clone()}
    save_file(tensors | pooler | head, tmp_path / SINGLE)
    found = read_hf(tmp_path)
    write_hf(tmp_path / "exported", FAMILY, found.config, found.weights, None)
    compared = compare(tmp_path / "exported", FAMILY, ours_of(found))
    assert compared.difference < 1e-4 * compared.spread


def test_another_padding_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pad_token_id=0: positions begin behind it"):
        FAMILY.config({**BASE, "pad_token_id": 0})
    cfg, tokenizer = FAMILY.config(BASE | {"num_hidden_layers": 1}), BytesConfig().build()
    with pytest.raises(ConfigError, match=rf"padding token 1, and this tokenizer pads with {tokenizer.pad}\."):
        write_hf(tmp_path / "exported", FAMILY, cfg, dict(random_model(cfg).named_parameters()), tokenizer)
