"""Tokenizers in older files than tokenizer.json, against what transformers reads of them."""

import json
from pathlib import Path

import pytest

from lm.data.kinds import BPEConfig
from lm.data.tokenizer.tokenizer import load_tokenizer
from lm.errors import CheckpointError
from lm.hf.io.older import read_foreign

transformers = pytest.importorskip("transformers")
TEXTS = ["some text, some more text", "中文 é", "x\r\n\ty  z", ""]


def gpt2(folder: Path, adds_bos: bool) -> Path:
    """As OpenAI published GPT-2."""
    model = BPEConfig(vocab_size=300).build(TEXTS * 9).content()["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "unk_token": "<|eos|>", "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "add_bos_token": adds_bos, **names}))
    return folder


def bert(folder: Path) -> Path:
    """As Google published BERT."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "some", "text", "##s", "more", ",", "x", "z", "e"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True}))
    return folder


@pytest.mark.parametrize("adds_bos", [False, True])
def test_vocab_json_and_merges_txt_are_read(tmp_path: Path, adds_bos: bool) -> None:
    """Seen to fail: 'tokenizer.json does not exist', of models that lm imports otherwise."""
    said: list[str] = []
    found = read_foreign(gpt2(tmp_path, adds_bos), said.append)
    assert said == ["tokenizer.json is missing: transformers made it of vocab.json"]
    assert found.specials == ("<|bos|>", "<|eos|>", "<|pad|>")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [[*found.prefix, *found.encode(text)] for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert read_foreign(tmp_path / "vocab.json", said.append).hash == found.hash
    found.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").hash == found.hash


def test_vocab_txt_is_read(tmp_path: Path) -> None:
    found = read_foreign(bert(tmp_path), print)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [found.encode(text) for text in TEXTS] == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]


def test_a_tokenizer_json_is_read_and_no_older_file(tmp_path: Path) -> None:
    made = BPEConfig(vocab_size=300).build(TEXTS)
    made.save(gpt2(tmp_path, False))
    assert read_foreign(tmp_path, pytest.fail).content() == made.content()


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (["tokenizer.model"], "pip install sentencepiece protobuf"),
        (["vocab.json"], "Restore the file"),
        (["vocab.json", "source.spm"], "pip install sentencepiece protobuf"),
        (["vocab.json", "sentencepiece.bpe.model"], "pip install sentencepiece protobuf"),
    ],
    ids=["its own", "no SentencePiece", "Marian", "M2M-100"],
)
def test_a_file_that_transformers_cannot_read_is_named_with_the_remedy(tmp_path: Path, names: list[str], remedy: str) -> None:
    """Seen to fail: of Marian's and M2M-100's the advice was to restore vocab.json."""
    for name in names:
        (tmp_path / name).write_bytes(b"\x0a\x0e broken")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2" if names == ["vocab.json"] else "llama"}))
    with pytest.raises(CheckpointError, match=rf"{names[0]} cannot be read by transformers .*{remedy}"):
        read_foreign(tmp_path, print)
