"""The faster encoder gives the ids of the library, or the library is used."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.data.kinds import BPEConfig, BytesConfig, TextConfig, UnigramConfig, WordPieceConfig
from lm.data.store.prepare import prepare
from lm.data.tokenizer import tiktoken_ as module
from lm.data.tokenizer.splits import SPLITS
from lm.data.tokenizer.tiktoken_ import fastest
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer

TEXTS = [Path(module.__file__).read_text(encoding="utf-8"), "中文 العربية हिन्दी 👩‍👩‍👧 don't 1234567\r\n\t x  " * 20]


def build(**options: Any) -> Tokenizer:
    return BPEConfig(vocab_size=500, **options).build(TEXTS)


@pytest.mark.parametrize("pattern", ["own", "gpt2", "gpt4", "gpt4o", "llama3"])
def test_ids_are_the_librarys(pattern: Any) -> None:
    """Of random characters of every plane, and of pieces of text without a place to cut."""
    pytest.importorskip("tiktoken")
    tokenizer, draw = build(pattern=pattern), random.Random(0)
    planes = [range(128), range(0x250), range(0x3000), range(0xE000, 0x10000), range(0x1F300, 0x1FA00), range(0x110000 - 0x800)]
    texts = ["".join(chr(c) for c in draw.choices(draw.choice(planes), k=80) if not 0xD800 <= c < 0xE000) for _ in range(2000)]
    texts += ["", " " * 9000, "x" * 9000, "\n" * 9000, "\n \t" * 3000, "漢" * 3000, "<|eos|> <|bos|>", *TEXTS]
    encode = fastest(tokenizer)
    assert encode != tokenizer.encode_arrays
    assert [ids.tolist() for ids in encode(texts)] == [tokenizer.encode(text) for text in texts]
    assert all(ids.dtype == np.uint32 for ids in encode(texts))


def test_gpt4os_split_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which keeps the marks of a letter with it, where GPT-4's cuts a word at each."""
    published = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *args, **kwargs: {})
    assert SPLITS["gpt4o"] == published.o200k_base()["pat_str"]
    pieces = {name: BPEConfig(vocab_size=300, pattern=name).build(["नमस्ते"] * 9).encode("नमस्ते") for name in ("gpt4", "gpt4o")}
    assert len(pieces["gpt4o"]) == 1 < len(pieces["gpt4"])


def test_preparing_makes_the_same_tokens_with_and_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tiktoken")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text[n:]}) + "\n" for n in range(40) for text in TEXTS))
    found = []
    for name in ("with", "without"):
        cfg = TextConfig(files=str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / name))
        found.append(prepare(cfg, BPEConfig(vocab_size=400), log=lambda line: None).fingerprint)
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert found[0] == found[1]


@pytest.mark.parametrize("cfg", [BytesConfig(), UnigramConfig(vocab_size=400), WordPieceConfig(vocab_size=400)], ids=lambda cfg: cfg.kind)
def test_a_tokenizer_that_is_no_plain_bpe_is_encoded_by_the_library(cfg: Any) -> None:
    tokenizer = cfg.build(TEXTS)
    assert fastest(tokenizer) == tokenizer.encode_arrays


CHANGES: dict[str, tuple[str, ...]] = {
    "normalizer": ("normalizer", '{"type": "NFC"}'),
    "order": ("model.merges", "reversed"),
    "added": ("added_tokens.3", '{"id": 500, "content": "xyz", "special": false}'),
    "prefix": ("pre_tokenizer.pretokenizers.1.add_prefix_space", "true"),
    "behaviour": ("pre_tokenizer.pretokenizers.0.behavior", '"Removed"'),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_tokenizer_that_does_more_is_encoded_by_the_library(case: str, tmp_path: Path) -> None:
    path, value = CHANGES[case]
    build().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    *parents, last = (int(part) if part.isdecimal() else part for part in path.split("."))
    at = tree
    for part in parents:
        at = at[part]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    if last == 3:
        at.append({**flags, **json.loads(value)})
    else:
        at[last] = at[last][::-1] if value == "reversed" else json.loads(value)
    file.write_text(json.dumps(tree))
    tokenizer = load_tokenizer(file)
    assert fastest(tokenizer) == tokenizer.encode_arrays
