"""Preparing: killed anywhere, it goes on; errors of the reading thread are its own."""

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

from lm.data.kinds import ChatRecord, TextConfig, TokenizerFileConfig
from lm.data.store import finished
from lm.data.store import tokenise as module
from lm.data.store.prepare import Prepared, prepare
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError, ResourceError


def corpus(path: Path, chats: bool) -> TextConfig:
    records: list[Any] = [{"text": f"{n} and more " * (n % 17 + 1)} for n in range(3000)]
    if chats:
        said = [("user", "assistant", f"{n} and more " * (n % 17 + 1)) for n in range(3000)]
        records = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[:5]}]} for _, _, text in said]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    record = ChatRecord() if chats else None
    return TextConfig(files=str(path), cache_dir=str(path.parent / "cache"), record=record, val_frac=0.2)


def build(cfg: TextConfig, tokenizer: Tokenizer, kill_after: int | None, told: "multiprocessing.Queue[list[str]]") -> None:
    """Small batches and a state after each few; dies right after the n-th batch was written."""
    for name, value in (("_BATCH_CHARS", 5000), ("_STATE_CHARS", 20_000)):
        setattr(module, name, value)
    add, count = module._Stores.add, 0

    def counted(self: Any, batch: Any, ids: Any) -> bool:
        nonlocal count
        due = add(self, batch, ids)
        count += 1
        if count == kill_after:
            for writer in self._writers.values():
                writer._write()  # more on disk than the state says
            os.kill(os.getpid(), signal.SIGKILL)
        return due

    module._Stores.add = counted  # type: ignore[method-assign]
    lines: list[str] = []
    prepare(cfg, tokenizer, log=lines.append)
    told.put(lines)


@pytest.mark.parametrize("chats", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_preparation_goes_on_and_gives_the_same_bytes(tmp_path: Path, byte_tokenizer: Tokenizer, chats: bool) -> None:
    """Seen to fail with the state unread, and with what was written after it kept."""
    context = multiprocessing.get_context("fork")
    whole = prepare(corpus(tmp_path / "a.jsonl", chats), byte_tokenizer, log=lambda line: None)
    cfg = TextConfig(**{**dict(corpus(tmp_path / "a.jsonl", chats)), "cache_dir": str(tmp_path / "other")})
    told: multiprocessing.Queue[list[str]] = context.Queue()
    for kill_after in (2, 9, 14, 25):
        process = context.Process(target=build, args=(cfg, byte_tokenizer, kill_after, told))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    process = context.Process(target=build, args=(cfg, byte_tokenizer, None, told))
    process.start()
    lines = told.get(timeout=30)
    process.join()
    assert any("Going on after" in line for line in lines)
    again = prepare(cfg, byte_tokenizer, log=lambda line: None)
    assert same(whole, again)
    assert not list((tmp_path / "other").rglob("*.half"))


SMALL = {"_BATCH_CHARS": 5000, "_STATE_CHARS": 20_000}
CLOSE = module.ShardWriter.close


def die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def close_the_first(self: Any, *options: Any, **named: Any) -> Any:
    """Dies when the first split is complete and the others are not."""
    if self._split == "val":
        die()
    return CLOSE(self, *options, **named)


def other_cache(cfg: TextConfig, folder: Path) -> TextConfig:
    return TextConfig(**{**dict(cfg), "cache_dir": str(folder)})


def prepare_with(of: object, name: str, instead: Callable[..., Any], cfg: TextConfig, tokenizer: Tokenizer) -> None:
    with patch.multiple(module, **SMALL), patch.object(of, name, instead):
        prepare(cfg, tokenizer, log=lambda line: None)


def kill_at(of: object, name: str, instead: Callable[..., Any], cfg: TextConfig, tokenizer: Tokenizer) -> None:
    """Prepares in a process that dies in `instead`, which it has in the place of the function `name`."""
    process = multiprocessing.get_context("fork").Process(target=prepare_with, args=(of, name, instead, cfg, tokenizer))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("of", "name", "instead"),
    [(module.ShardWriter, "close", close_the_first), (finished, "write_index", die)],
    ids=["between two splits", "before the index"],
)
def test_a_preparation_killed_at_its_very_end_goes_on_and_gives_the_same_bytes(
    tmp_path: Path, byte_tokenizer: Tokenizer, of: object, name: str, instead: Callable[..., Any]
) -> None:
    """Seen to fail with the file of the documents' starts removed before the state, when all of them were 0; and with the state removed
    before the index is written, when all tokens were made anew."""
    cfg = corpus(tmp_path / "a.jsonl", chats=False)
    other = other_cache(cfg, tmp_path / "other")
    kill_at(of, name, instead, other, byte_tokenizer)
    lines: list[str] = []
    again = prepare(other, byte_tokenizer, log=lines.append)
    assert "Going on after" in lines[0] and same(prepare(cfg, byte_tokenizer, log=lambda line: None), again)
    assert not [file for file in (tmp_path / "other").rglob("*") if file.suffix == ".half" or file.name == "state.json"]


def test_a_preparation_whose_disk_was_full_goes_on_and_gives_the_same_bytes(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """Seen to fail: all that had been made, maybe of hours, was deleted."""
    cfg = corpus(tmp_path / "a.jsonl", chats=False)
    other = other_cache(cfg, tmp_path / "other")
    whole = prepare(cfg, byte_tokenizer, log=lambda line: None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole.train.n_bytes // 2, limits[1]))
    try:
        with (
            patch.multiple(module, **SMALL),
            pytest.raises(ResourceError, match=r"ulimit -f\) or set data.cache_dir: what is done is kept"),
        ):
            prepare(other, byte_tokenizer, log=lambda line: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    lines: list[str] = []
    assert same(prepare(other, byte_tokenizer, log=lines.append), whole)
    assert "Going on after" in lines[0] and not list((tmp_path / "other").rglob("*.half"))


def test_a_preparation_killed_while_it_compares_the_splits_makes_no_token_again(
    tmp_path: Path, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: it began anew, as the state was removed by then."""
    cfg = corpus(tmp_path / "a.jsonl", chats=False)
    other = other_cache(cfg, tmp_path / "other")
    whole = prepare(cfg, byte_tokenizer, log=lambda line: None)
    kill_at(finished, "contamination", die, other, byte_tokenizer)
    monkeypatch.setattr("lm.data.store.prepare.tokenise", None)
    lines: list[str] = []
    assert same(whole, prepare(other, byte_tokenizer, log=lines.append))
    assert "all of which an earlier process has made" in lines[0] and not list((tmp_path / "other").rglob("*.half"))


def test_a_state_is_saved_when_all_that_it_counts_is_on_the_disk(
    tmp_path: Path, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail without: after a power cut the missing end of a shard would be read as zeros."""
    done: list[str] = []
    for name, value in SMALL.items():
        monkeypatch.setattr(module, name, value)
    sync, replace = module.sync, module.replace_file
    monkeypatch.setattr(module, "sync", lambda path: (done.append(path.name), sync(path)))
    monkeypatch.setattr(module, "replace_file", lambda path, text: (done.append("STATE"), replace(path, text)))
    prepare(corpus(tmp_path / "a.jsonl", chats=False), byte_tokenizer, log=lambda line: None)
    assert {"train-00000.bin", "val-00000.bin", "train.documents.half", "train.parts.half"} <= set(done[: done.index("STATE")])


def same(one: Prepared, other: Prepared) -> bool:
    """In every file of the folder, and in every figure."""
    folders = [part.folder for found in (one, other) for part in found.parts.values()]
    contents = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders]
    return contents[0] == contents[1] and one.fingerprint == other.fingerprint and one.zlib_bits_per_byte == other.zlib_bits_per_byte


def test_a_cache_that_has_lost_a_byte_or_a_bit_is_named(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """Seen to fail with the checksum uncompared."""
    cfg = corpus(tmp_path / "a.jsonl", False)
    shard = next(prepare(cfg, byte_tokenizer, log=lambda line: None).train.folder.glob("train-*.bin"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"{shard}: .* has another checksum than the index says. Delete"):
        prepare(cfg, byte_tokenizer, log=lambda line: None)


def test_damage_that_a_sample_passes_by_is_named_on_demand(
    tmp_path: Path, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only then: a start reads a part of what is there. Seen to fail with data.verify unread."""
    monkeypatch.setattr("lm.data.store.shards._BLOCK", 8)
    cfg = corpus(tmp_path / "a.jsonl", False)
    first = prepare(cfg, byte_tokenizer, log=lambda line: None)
    shard = next(first.train.folder.glob("train-*.bin"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert prepare(cfg, byte_tokenizer, log=lambda line: None).fingerprint == first.fingerprint
    with pytest.raises(ConfigError, match=rf"{shard}: .* has another checksum than the index says. Delete"):
        prepare(cfg.replace(verify="full"), byte_tokenizer, log=lambda line: None)


def test_an_error_while_reading_ahead_is_raised_where_it_is_awaited(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    cfg = corpus(tmp_path / "a.jsonl", False)
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write("{broken\n")
    with pytest.raises(ConfigError, match=r"a.jsonl:3001: the line is not JSON"):
        prepare(cfg, byte_tokenizer, log=lambda line: None)
    assert not list((tmp_path / "cache" / "tokens").glob("*.half"))


def test_a_tokenizer_that_ends_no_document_is_told(tmp_path: Path) -> None:
    """Seen to fail: texts without an end were prepared, and nothing said so."""
    raw = RawTokenizer(models.WordLevel({"a": 0, "[STOP]": 1, "?": 2}, unk_token="?"))
    raw.add_special_tokens(["[STOP]"])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a" * 100)
    lines: list[str] = []
    for eos in (None, "[STOP]"):
        cfg = TextConfig(files=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), max_contamination=1)
        prepare(cfg, TokenizerFileConfig(path=str(tmp_path), eos=eos), log=lines.append)
    assert len([line for line in lines if "no end of a text is learned" in line]) == 1
