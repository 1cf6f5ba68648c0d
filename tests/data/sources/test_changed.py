"""A file that is written to while it is prepared is refused, and nothing of it is kept under the hash of what it was."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from lm.data.kinds import BPEConfig, BytesConfig, TextConfig
from lm.data.sources.base import Source
from lm.data.store.cache import build_once
from lm.data.store.prepare import build_tokens, find_tokenizer, prepare, token_folder
from lm.errors import ConfigError


def lines(word: str) -> bytes:
    return "".join(json.dumps({"text": f"{word} {n}"}) + "\n" for n in range(200)).encode()


def table(word: str) -> bytes:
    return ("text\n" + "".join(f"{word} {n}\n" for n in range(200))).encode()


def parquet(word: str) -> bytes:
    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": [f"{word} {n}" for n in range(200)]}), sink)
    return bytes(sink.getvalue())


CONTENT: dict[str, Callable[[str], bytes]] = {
    "a.txt": table,
    "a.txt.gz": lambda word: gzip.compress(table(word), mtime=0),
    "a.txt.zst": lambda word: zstandard.compress(table(word)),
    "a.jsonl": lines,
    "a.jsonl.gz": lambda word: gzip.compress(lines(word), mtime=0),
    "a.jsonl.zst": lambda word: zstandard.compress(lines(word)),
    "a.csv": table,
    "a.tsv": table,
    "a.parquet": parquet,
}


def opened(path: Path, content: bytes) -> tuple[TextConfig, Source]:
    """A source whose files have been hashed, and not read yet."""
    path.write_bytes(content)
    cfg = TextConfig(files=str(path), cache_dir=str(path.parent / "cache"))
    (path.parent / "cache").mkdir(exist_ok=True)
    return cfg, cfg.open(path.parent / "cache")


@pytest.mark.parametrize("how", ["rewritten", "longer"])
@pytest.mark.parametrize("name", CONTENT)
def test_a_file_that_changes_after_it_was_hashed_is_refused_and_not_cached(tmp_path: Path, name: str, how: str) -> None:
    """Seen to fail with the comparison of hashes removed: the tokens of the new text stood under the hash of the old one."""
    cfg, source = opened(tmp_path / name, CONTENT[name]("old"))
    new = CONTENT[name]("new") if how == "rewritten" else CONTENT[name]("old") * 2
    (tmp_path / name).write_bytes(new)
    cache = tmp_path / "cache"
    tokenizer = BytesConfig().build()
    folder = token_folder(cfg, source, tokenizer, cache)
    with pytest.raises(ConfigError, match=rf"{tmp_path / name}: (the file has changed since|cannot be read)"):
        build_once(folder, lambda half: build_tokens(cfg, source, tokenizer, half, print), print)
    assert not folder.exists() and not list(cache.rglob("*.half"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_that_is_gone_after_it_was_hashed_is_named(tmp_path: Path, name: str) -> None:
    """Seen to fail where the system's error came through: lm prepare called it a bug of its own."""
    _, source = opened(tmp_path / name, CONTENT[name]("old"))
    (tmp_path / name).unlink()
    assert not source.untouched()
    with pytest.raises(ConfigError, match=rf"{tmp_path / name}: .*cannot be read"):
        list(source.documents())
    with pytest.raises(ConfigError, match=rf"{tmp_path / name}: it cannot be read any more \(No such file or directory\)"):
        source.confirm()


@pytest.mark.slow
def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    _, source = opened(tmp_path / "a.jsonl", lines("old") * 2000)  # more than is read at once
    documents = source.documents()
    next(documents)
    with (tmp_path / "a.jsonl").open("ab") as stream:
        stream.write(lines("new"))
    with pytest.raises(ConfigError, match=r"a.jsonl: the file has changed since its preparation began"):
        for _ in documents:
            pass


def test_a_tokenizer_is_not_trained_on_the_beginning_of_a_file_that_changes(tmp_path: Path) -> None:
    """Of a large file it reads a part, so that the rest is hashed at the end. Seen to fail without that."""
    cfg, source = opened(tmp_path / "a.txt", table("old") * 2000)
    (tmp_path / "a.txt").write_bytes(table("old") * 1999 + table("new"))
    with pytest.raises(ConfigError, match=r"a.txt: the file has changed"):
        find_tokenizer(cfg, BPEConfig(vocab_size=300, max_chars=100), {"": source}, tmp_path / "cache", print, ())
    assert not list((tmp_path / "cache" / "tokenizers").glob("*/tokenizer.json"))


def test_no_state_to_go_on_from_is_kept_of_a_file_that_has_changed(tmp_path: Path) -> None:
    _, source = opened(tmp_path / "a.txt", table("old"))
    assert source.untouched()
    (tmp_path / "a.txt").write_bytes(table("old") + b"x")
    assert not source.untouched()


def test_a_file_that_is_only_touched_is_read_on(tmp_path: Path) -> None:
    cfg, source = opened(tmp_path / "a.txt", table("old"))
    expected = prepare(cfg, BytesConfig(), log=lambda line: None).fingerprint
    os.utime(tmp_path / "a.txt", (1, 1))
    list(source.documents())
    source.confirm()
    assert prepare(cfg, BytesConfig(), log=lambda line: None).fingerprint == expected
