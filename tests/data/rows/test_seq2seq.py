"""Pairs: labels, decoder inputs, padding and truncation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.data.kinds import (
    BPEConfig,
    BytesConfig,
    CausalConfig,
    ChatRecord,
    FIMConfig,
    MLMConfig,
    PairRecord,
    Seq2SeqConfig,
    SFTConfig,
    TextConfig,
)
from lm.data.rewards.base import Answer
from lm.data.rewards.compiles import CompilesReward
from lm.data.rows.build import build_rows
from lm.data.rows.seq2seq import shift_right
from lm.data.sources.base import Turn, turns_document
from lm.data.sources.docstrings import functions
from lm.data.store.prepare import Prepared, prepare
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch
from lm.nn.model_config import ModelConfig

Prepare = Callable[..., Prepared]
LONG = TextConfig(files="x", seq_len=200)


def test_shift_right_is_that_of_t5() -> None:
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.models.bart.modeling_bart import shift_tokens_right

    labels = torch.tensor([[5, 6, 1, IGNORED], [7, 1, IGNORED, IGNORED]])
    with torch.device("meta"):
        t5 = T5ForConditionalGeneration(
            T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8, vocab_size=10, decoder_start_token_id=0, pad_token_id=0)
        )
    assert shift_right(labels, 0, 0).tolist() == t5._shift_right(labels).tolist() == [[0, 5, 6, 1], [0, 7, 1, 0]]
    assert torch.equal(shift_right(labels, 2, 9), shift_tokens_right(labels, 9, 2))


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def prepared(prepare_text: Prepare, tmp_path: Path) -> Prepared:
    records = [{"source": f"question {n} " * (n % 9 + 1), "target": f"answer {n}" * (n % 4 + 1)} for n in range(120)]
    return prepare_text(write(tmp_path / "a.jsonl", records), record=PairRecord())


def rows_of(found: Prepared, model: ModelConfig, seq_len: int = 200, target_len: int | None = None) -> list[tuple[str, str, Batch]]:
    """Source and target text of each row, and the row."""
    rows = build_rows(Seq2SeqConfig(target_len=target_len), TextConfig(files="x", seq_len=seq_len), found.train, found.tokenizer, model)
    one_by_one = [rows.batch(np.array([i])) for i in range(len(rows))]
    return [(text(found.tokenizer, batch.source_tokens), text(found.tokenizer, batch.labels), batch) for batch in one_by_one]


def text(tokenizer: Tokenizer, ids: torch.Tensor | None) -> str:
    assert ids is not None
    return tokenizer.decode([i for i in ids.flatten().tolist() if i != IGNORED])


def test_each_row_is_a_pair_with_eos_at_both_ends_and_the_start_token_first(prepared: Prepared, encoder_decoder: ModelConfig) -> None:
    eos, bos, pad = prepared.tokenizer.eos, prepared.tokenizer.bos, prepared.tokenizer.pad
    for source, target, batch in rows_of(prepared, encoder_decoder):
        n = int(source.split()[1])
        assert source == f"question {n} " * (n % 9 + 1) and target == f"answer {n}" * (n % 4 + 1)
        assert batch.labels is not None and batch.source_tokens is not None
        assert batch.positions is not None and batch.source_positions is not None
        learned = batch.labels[0][batch.labels[0] != IGNORED].tolist()
        assert learned[-1] == eos and batch.tokens[0, : len(learned)].tolist() == [bos, *learned[:-1]]
        assert batch.positions[0].tolist() == [*range(len(learned)), *[-1] * (batch.tokens.shape[1] - len(learned))]
        read = batch.source_tokens[0][batch.source_positions[0] >= 0].tolist()
        assert read[0] == bos and read[-1] == eos and set(batch.source_tokens[0, len(read) :].tolist()) <= {pad}
    assert prepared.train.n_bytes == sum(len(target.encode()) for _, target, _ in rows_of(prepared, encoder_decoder))


def test_a_batch_is_its_rows_side_by_side(prepared: Prepared, encoder_decoder: ModelConfig) -> None:
    rows = build_rows(
        Seq2SeqConfig(), TextConfig(files="x", seq_len=200), prepared.train, prepared.tokenizer, encoder_decoder.replace(start_token=7)
    )
    ids = np.array([5, 0, 9, 5])
    batch = rows.batch(ids)
    for at, i in enumerate(ids):
        alone = rows.batch(np.array([i]))
        for together, own in ((batch.tokens, alone.tokens), (batch.labels, alone.labels), (batch.source_tokens, alone.source_tokens)):
            assert together is not None and own is not None
            assert torch.equal(together[at, : own.shape[1]], own[0]) and len(set(together[at, own.shape[1] :].tolist())) <= 1
    assert batch.tokens[:, 0].tolist() == [7] * 4


def test_a_decoder_reads_the_source_and_goes_on_with_the_target(
    prepared: Prepared, decoder: ModelConfig, encoder_decoder: ModelConfig
) -> None:
    ids = np.arange(20)
    joined = build_rows(Seq2SeqConfig(), LONG, prepared.train, prepared.tokenizer, decoder).batch(ids)
    apart = build_rows(Seq2SeqConfig(), LONG, prepared.train, prepared.tokenizer, encoder_decoder).batch(ids)
    assert joined.labels is not None and apart.labels is not None and apart.source_tokens is not None
    assert apart.source_positions is not None and joined.positions is not None and joined.source_tokens is None
    for row in range(20):
        source = apart.source_tokens[row][apart.source_positions[row] >= 0]
        target = apart.labels[row][apart.labels[row] != IGNORED]
        whole = torch.cat([source, target])
        n = len(whole) - 1
        assert torch.equal(joined.tokens[row, :n], whole[:-1])
        assert joined.labels[row, :n].tolist() == [IGNORED] * (len(source) - 1) + target.tolist()
        assert (joined.positions[row, n:] == -1).all() and (joined.labels[row, n:] == IGNORED).all()


def test_too_long_texts_are_cut_before_their_eos_and_counted(prepared: Prepared, encoder_decoder: ModelConfig) -> None:
    found = rows_of(prepared, encoder_decoder, seq_len=40, target_len=12)
    whole = rows_of(prepared, encoder_decoder)
    for (source, target, batch), (full_source, full_target, _) in zip(found, whole, strict=True):
        assert full_source.startswith(source) and full_target.startswith(target)
        assert batch.labels is not None and batch.source_tokens is not None
        learned = batch.labels[0][batch.labels[0] != IGNORED]
        assert len(learned) <= 12 and learned[-1] == prepared.tokenizer.eos
        assert (target == full_target) == (len(full_target) < 12) and batch.source_tokens.shape[1] <= 48
    rows = build_rows(Seq2SeqConfig(target_len=12), LONG.replace(seq_len=40), prepared.train, prepared.tokenizer, encoder_decoder)
    said = rows.describe()
    counts = sum(len(source) + 2 > 40 for source, _, _ in whole), sum(len(target) + 1 > 12 for _, target, _ in whole)
    assert f"train: {counts[0]:,} sources and {counts[1]:,} targets of {len(whole):,}" in said


def test_the_bpe_sees_sources_and_targets(prepare_text: Prepare, tmp_path: Path) -> None:
    records = [{"source": f"abcabc {n}", "target": f"xyzxyz {n}"} for n in range(300)]
    found = prepare_text(write(tmp_path / "a.jsonl", records), BPEConfig(vocab_size=270), record=PairRecord())
    assert len(found.tokenizer.encode("abcabc xyzxyz")) < 8


def test_fields_may_lie_in_objects(prepare_text: Prepare, tmp_path: Path, encoder_decoder: ModelConfig) -> None:
    path = write(tmp_path / "a.jsonl", [{"translation": {"de": f"Satz {n}", "en": f"sentence {n}"}} for n in range(60)])
    found = prepare_text(path, record=PairRecord(source="translation.de", target="translation.en"))
    assert all(source.startswith("Satz") and target.startswith("sentence") for source, target, _ in rows_of(found, encoder_decoder))
    with pytest.raises(ConfigError, match=r"a.jsonl:1: field 'translation.fr' is missing; .* translation. Set data.record.target"):
        prepare_text(path, record=PairRecord(source="translation.de", target="translation.fr"))


def test_texts_without_fields_cannot_be_pairs(prepare_text: Prepare, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"a.txt is a text, and data.record.kind=pair needs records with fields"):
        prepare_text(tmp_path / "a.txt", record=PairRecord())


def test_a_pair_with_an_empty_side_is_left_out(prepare_text: Prepare, tmp_path: Path) -> None:
    records = [{"source": f"a {n}", "target": "" if n % 2 else f"b {n}"} for n in range(80)]
    found = prepare_text(write(tmp_path / "a.jsonl", records), record=PairRecord())
    assert found.train.n_documents + found.val.n_documents == found.parts[""].index["skipped"] == 40


MODULE = '''
def first(a):
    """Adds one.

    And no more.
    """
    # a comment
    return a + 1


class Thing:
    async def second(self):
        'Short.'
        def third():
            """Inner."""
            return 3
        return await third()

    def one_line(self): "Not on its own line."; return 1
    def only_a_docstring(self):
        """Nothing else."""
    def none(self):
        return 0
'''


def test_functions_are_parted_from_their_docstrings() -> None:
    found = {each.target: each.source for each in functions(MODULE)}
    assert list(found) == ["Adds one.\n\nAnd no more.", "Short.", "Inner."]
    assert found["Adds one.\n\nAnd no more."] == "def first(a):\n    # a comment\n    return a + 1\n"
    assert found["Short."].startswith("async def second(self):\n    def third():\n") and '"""Inner."""' in found["Short."]
    assert next(functions(MODULE))[0] == 'def first(a):\n    """Adds one.\n\n    And no more.\n    """\n'
    for head, source, *_ in functions(MODULE):  # what data=stdlib_code asks for, and what it answers
        assert CompilesReward().score(Answer(head, source, source, 1, True)) == 1.0
    assert next((each.n_arguments, each.does) for each in functions(MODULE)) == (1, ["returns"])
    more = 'def f(a, /, *b, c=1, **d):\n    """Doc."""\n    while a:\n        raise ValueError\n'
    assert [(each.n_arguments, each.does) for each in functions(more)] == [(4, ["raises", "loops"])]
    assert list(functions("def broken(:")) == [] == list(functions("\0"))
    assert [each.target for each in functions("def f():\n    x = '\x0c'\n\x0c\ndef g():\n    'Doc.'\n    return 1\n")] == ["Doc."]


TEXT, PAIRS, CHATS = TextConfig(files="x"), TextConfig(files="x", record=PairRecord()), TextConfig(files="x", record=ChatRecord())


@pytest.mark.parametrize(
    ("objective", "model", "data", "message"),
    [
        (MLMConfig(), "decoder", TEXT, "objective=mlm trains model.kind=encoder, but model.kind is decoder"),
        (Seq2SeqConfig(), "encoder", PAIRS, "objective=seq2seq trains model.kind=encoder_decoder or decoder"),
        (CausalConfig(), "encoder", TEXT, "objective=causal trains model.kind=decoder"),
        (CausalConfig(), "decoder", PAIRS, "objective=causal needs records of the kind text, and those of data are of the kind pair"),
        (SFTConfig(), "encoder_decoder", CHATS, "Choose another model, or objective=seq2seq and records of the kind pair.$"),
        (Seq2SeqConfig(), "encoder_decoder", CHATS, "those of data are of the kind chat. Choose other data or set data.record.$"),
        (FIMConfig(), "decoder", TEXT.replace(mask_documents=False), "objective=fim takes each document on its own"),
    ],
)
def test_what_does_not_fit_is_refused(objective: Any, model: str, data: TextConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective.require_fit(model, data)


@pytest.mark.slow  # reads the whole standard library
def test_the_standard_library_has_thousands_of_pairs(tmp_path: Path) -> None:
    from lm.data.kinds import StdlibDocstringsConfig

    found = prepare(StdlibDocstringsConfig(cache_dir=str(tmp_path)), BytesConfig(), log=lambda line: None)
    assert found.train.n_documents > 4000 and found.val.n_documents > 100
    assert found.parts[""].index["contamination"]["documents"] < found.train.n_documents / 50


def test_a_docstring_of_blank_space_makes_no_pair() -> None:
    turns = [Turn("source", "def f(): pass"), Turn("target", "  ")]
    assert turns_document(turns, "train") is None and turns_document([turns[0], Turn("tool", "")], "train") is not None
