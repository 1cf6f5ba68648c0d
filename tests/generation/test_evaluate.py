"""Loss and bits per byte = the sums by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers

from lm.data.kinds import BPEConfig, TextConfig
from lm.data.order import Ids
from lm.data.rows.causal import CausalRows
from lm.data.store.prepare import Prepared, prepare
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import ConfigError
from lm.generation.evaluate import Evaluator
from lm.nn.batch import IGNORED, Batch
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
    found = Evaluator(model, tokenizer, 7).totals(rows, ids).figures()
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
    first, second = (Evaluator(model, tokenizer, n).totals(rows, np.arange(len(rows))).figures() for n in (1, 1000))
    assert first == pytest.approx(second, rel=1e-5)
    assert model.training
    assert torch.is_grad_enabled()


def test_an_even_guess_costs_the_logarithm_of_the_vocabulary(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = redrawn(config(vocab_size=320))
    torch.nn.init.zeros_(model.embed.weight)
    rows = CausalRows(prepared(tmp_path, tokenizer).val, tokenizer, 24, True)
    found = Evaluator(model, tokenizer, 8).totals(rows, np.arange(len(rows))).figures()
    assert found["val_loss"] == pytest.approx(math.log(320), rel=1e-6)
    assert found["val_bits_per_byte"] == pytest.approx(math.log2(320) * found["tokens"] / found["bytes"], rel=1e-6)


def test_bytes_are_shared_out_evenly_where_tokens_are_not_bytes(tmp_path: Path, model: DecoderLM) -> None:
    raw = RawTokenizer(models.WordLevel({"[UNK]": 0, "café": 1, "costs": 2, "number": 3}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    store = prepared(tmp_path, tokenizer).val
    rows = CausalRows(store, tokenizer, 10, True)
    whole = Evaluator(model, tokenizer, 8).totals(rows, np.arange(len(rows))).figures()
    part = Evaluator(model, tokenizer, 8).totals(rows, np.arange(3)).figures()
    assert whole["bytes"] == store.n_bytes
    assert part["bytes"] / part["tokens"] == pytest.approx(whole["bytes"] / whole["tokens"], abs=0.05)  # bytes are rounded


def test_rows_without_anything_to_predict_are_refused(tmp_path: Path, model: DecoderLM, tokenizer: Tokenizer) -> None:
    rows = CausalRows(prepared(tmp_path, tokenizer).val, tokenizer, 24, True)
    with pytest.raises(ConfigError, match="0 rows have 0 tokens"):
        Evaluator(model, tokenizer, 8).totals(rows, np.arange(0)).figures()


class HalfRight(CausalRows):
    """Of which a model's own choice is the label in every third place."""

    model: DecoderLM

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        found = super().batch(ids, draw)
        assert found.labels is not None
        own = self.model(found)[:, ::3, :259].argmax(-1)
        found.labels[:, ::3] = torch.where(found.labels[:, ::3] == IGNORED, IGNORED, own)
        return found


@pytest.mark.parametrize("mask_documents", [True, False])
def test_calibration_and_loss_by_place_equal_sums_by_hand(tmp_path: Path, tokenizer: Tokenizer, mask_documents: bool) -> None:
    """Over dense probabilities, label by label. Seen to fail with bins that are closed below, and with places of the row."""
    model = redrawn(config(vocab_size=320))
    model.embed.weight.data *= 3  # sure of some tokens
    rows = HalfRight(prepared(tmp_path, tokenizer).val, tokenizer, 24, mask_documents)
    rows.model = model
    ids = np.arange(len(rows))
    parts = [Evaluator(model, tokenizer, 5).totals(rows, ids[at::3], closely=True) for at in range(3)]
    found = (parts[0] + parts[1] + parts[2]).curves
    batch = rows.batch(ids)
    assert found is not None and batch.labels is not None
    dense = model(batch).double().softmax(-1).detach().numpy()
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(15)]
    places: dict[int, list[float]] = {}
    for row, column in np.argwhere(batch.labels.numpy() != IGNORED).tolist():
        p, label = dense[row, column], int(batch.labels[row, column])
        place = column if batch.positions is None else int(batch.positions[row, column])
        bins[next(i for i in range(15) if p.max() <= (i + 1) / 15)].append((float(p.max()), bool(p.argmax() == label)))
        places.setdefault(0 if place == 0 else 2 ** int(math.log2(place)), []).append(-math.log(p[label]))
    n = sum(map(len, bins))
    gaps = [abs(np.mean([right for _, right in each]) - np.mean([sure for sure, _ in each])) * len(each) / n for each in bins if each]
    assert found.ece() == pytest.approx(sum(gaps), abs=1e-5) and sum(map(bool, bins)) > 4
    expected = [(np.mean([sure for sure, _ in each]), np.mean([right for _, right in each]), len(each)) for each in bins if each]
    assert [tuple(each.values()) for each in found.reliability()] == [pytest.approx(each, abs=1e-5) for each in expected]
    told = {each["from"]: (each["loss"], each["tokens"]) for each in found.by_place()}
    assert told == {place: (pytest.approx(np.mean(nats), rel=1e-5), len(nats)) for place, nats in places.items()} and len(told) > 3


def test_looking_closely_changes_no_figure(tmp_path: Path, model: DecoderLM, tokenizer: Tokenizer) -> None:
    rows = CausalRows(prepared(tmp_path, tokenizer).val, tokenizer, 24, True)
    plain, close = (
        Evaluator(model, tokenizer, 7).totals(rows, np.arange(len(rows)), closely=closely).figures() for closely in (False, True)
    )
    assert {name: value for name, value in close.items() if name != "val_ece"} == plain and 0 < close["val_ece"] < 1
