"""Loss and bits per byte = the sums by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers

from lm.data.kinds import BPEConfig, TextConfig
from lm.data.rows.causal import CausalRows
from lm.data.store.prepare import Prepared, prepare
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import ConfigError
from lm.generation.evaluate import totals
from lm.nn.batch import IGNORED
from lm.nn.transformer import DecoderLM
from tests.nn.models import config, redrawn


def prepared(tmp_path: Path, tokenizer: Tokenizer, lines: int = 60) -> Prepared:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"text": "café number {i * i} costs {i} €"}}\n' for i in range(lines)), encoding="utf-8")
    data = TextConfig(files=str(path), val_frac=0.4, max_contamination=1.0, cache_dir=str(tmp_path / "cache"))
    return prepare(data, tokenizer, log=lambda line: None)


@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("step", [1, 3])
def test_figures_equal_sums_by_hand(tmp_path: Path, model: DecoderLM, mask_documents: bool, step: int) -> None:
    tokenizer = BPEConfig(vocab_size=300).build(["café number costs €"])
    store = prepared(tmp_path, tokenizer).val
    rows = CausalRows(store, tokenizer, 24, mask_documents)
    ids = np.arange(len(rows))[::step]
    found = totals(model, rows, ids, tokenizer, 7).figures()
    batch = rows.batch(ids)
    assert batch.labels is not None
    shown = batch.labels != IGNORED
    losses = -model(batch).log_softmax(-1).gather(-1, batch.labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)[shown]
    assert found["tokens"] == len(losses)
    assert found["bytes"] == sum(len(tokenizer.token_text(int(token)) or b"") for token in batch.labels[shown])
    assert step > 1 or found["bytes"] == store.n_bytes  # each document begins with bos, so each byte is predicted
    assert found["val_loss"] == pytest.approx(losses.double().mean().item(), rel=1e-5)
    assert found["val_bits_per_byte"] == pytest.approx(losses.double().sum().item() / math.log(2) / found["bytes"], rel=1e-5)


def test_figures_do_not_depend_on_the_micro_batch_or_the_mode(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = redrawn(config(vocab_size=320, dropout=0.5)).train()
    rows = CausalRows(prepared(tmp_path, tokenizer).val, tokenizer, 24, True)
    first, second = (totals(model, rows, np.arange(len(rows)), tokenizer, n).figures() for n in (1, 1000))
    assert first == pytest.approx(second, rel=1e-5)
    assert model.training
    assert torch.is_grad_enabled()


def test_an_even_guess_costs_the_logarithm_of_the_vocabulary(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = redrawn(config(vocab_size=320))
    torch.nn.init.zeros_(model.embed.weight)
    rows = CausalRows(prepared(tmp_path, tokenizer).val, tokenizer, 24, True)
    found = totals(model, rows, np.arange(len(rows)), tokenizer, 8).figures()
    assert found["val_loss"] == pytest.approx(math.log(320), rel=1e-6)
    assert found["val_bits_per_byte"] == pytest.approx(math.log2(320) * found["tokens"] / found["bytes"], rel=1e-6)


def test_bytes_are_shared_out_evenly_where_tokens_are_not_bytes(tmp_path: Path, model: DecoderLM) -> None:
    raw = RawTokenizer(models.WordLevel({"[UNK]": 0, "café": 1, "costs": 2, "number": 3}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    store = prepared(tmp_path, tokenizer).val
    rows = CausalRows(store, tokenizer, 10, True)
    whole = totals(model, rows, np.arange(len(rows)), tokenizer, 8).figures()
    part = totals(model, rows, np.arange(3), tokenizer, 8).figures()
    assert whole["bytes"] == store.n_bytes
    assert part["bytes"] / part["tokens"] == pytest.approx(whole["bytes"] / whole["tokens"], abs=0.05)  # bytes are rounded


def test_rows_without_anything_to_predict_are_refused(tmp_path: Path, model: DecoderLM, tokenizer: Tokenizer) -> None:
    rows = CausalRows(prepared(tmp_path, tokenizer).val, tokenizer, 24, True)
    with pytest.raises(ConfigError, match="0 rows have 0 tokens"):
        totals(model, rows, np.arange(0), tokenizer, 8).figures()
