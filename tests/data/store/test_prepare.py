import gzip
import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.data.kinds import BPEConfig, BytesConfig, StdlibConfig, TextConfig, TokenizerConfig, TokenizerFileConfig
from lm.data.sources.fingerprint import changed_files
from lm.data.store.prepare import Prepared, prepare
from lm.data.store.sample import training_texts
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError, ResourceError
from lm.schema import from_tree
from tests.conftest import unprivileged

Prepare = Callable[..., Prepared]
TEXT = "".join(f"line {n} of the text, Ünïcode 日本\n" for n in range(300))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def stream(store: TokenStore, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(store.read(0, store.n_tokens).tolist())


@pytest.mark.parametrize("tokenizer", [BytesConfig(), BPEConfig(vocab_size=300)])
def test_the_stores_hold_the_documents_of_each_split(prepare_text: Prepare, tmp_path: Path, tokenizer: object) -> None:
    lines = "".join(json.dumps({"text": f"{n} " * (n % 40 + 1)}) + "\n" for n in range(200))
    found = prepare_text(write(tmp_path / "a.jsonl", lines), tokenizer)
    assert found.train.n_documents + found.val.n_documents == 200 and found.val.n_documents > 5
    seen: list[str] = []
    for store in (found.train, found.val):
        starts = [*store.starts.tolist(), store.n_tokens]
        documents = [store.read(a, b).tolist() for a, b in pairwise(starts)]
        assert all(ids[0] == found.tokenizer.bos and ids[-1] == found.tokenizer.eos for ids in documents)
        texts = [found.tokenizer.decode(ids) for ids in documents]
        assert store.n_bytes == sum(len(text.encode()) for text in texts)
        seen += texts
    assert sorted(seen) == sorted(f"{n} " * (n % 40 + 1) for n in range(200))


def test_a_lone_text_is_its_two_parts(prepare_text: Prepare, tmp_path: Path) -> None:
    found = prepare_text(write(tmp_path / "a.txt", TEXT))
    assert stream(found.train, found.tokenizer) + stream(found.val, found.tokenizer) == TEXT
    val = stream(found.val, found.tokenizer).encode()
    assert found.val.n_bytes == len(val) and found.zlib_bits_per_byte == pytest.approx(8 * len(zlib.compress(val, 9)) / len(val))


def test_a_test_is_set_aside_from_what_validates_and_training_stays(prepare_text: Prepare, tmp_path: Path) -> None:
    """Seen to fail with the hash that holds documents out: then all of them, or none, were for the test."""
    records = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(2000)))
    text = write(tmp_path / "a.txt", TEXT)
    for path, n_val, n_test in [(records, 100, 100), (text, 1, 1)]:
        whole, apart = prepare_text(path), prepare_text(path, test_frac=0.5)
        assert stream(apart.train, apart.tokenizer) == stream(whole.train, whole.tokenizer) and whole.n_tokens("test") == 0
        test = apart.parts[""].stores["test"]
        assert apart.val.n_documents == pytest.approx(n_val, abs=25) and test.n_documents == pytest.approx(n_test, abs=25)
        assert test.n_tokens == pytest.approx(apart.val.n_tokens, rel=0.3)
        joined = stream(apart.val, apart.tokenizer) + stream(test, apart.tokenizer)
        assert (joined == stream(whole.val, whole.tokenizer)) is (path == text)
        assert sorted(joined.split()) == sorted(stream(whole.val, whole.tokenizer).split())


def test_a_test_without_documents_is_an_error(prepare_text: Prepare, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"test_frac=0.5: 0 documents for the test in .*, and 1 for validation. Raise"):
        prepare_text(write(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": "b"}\n'), test_frac=0.5)


@pytest.mark.parametrize("tokenizer", [BytesConfig(), BPEConfig(vocab_size=300)])
def test_a_document_in_pieces_is_one_document(
    prepare_text: Prepare, tmp_path: Path, tokenizer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.data.tokenizer.tokenizer.MOST_CHARS", 100)
    path = write(tmp_path / "a.txt", TEXT)
    found = prepare_text(path, tokenizer, val_files=str(path), max_contamination=1.0)
    assert found.train.starts.tolist() == [0] and found.train.n_bytes == len(TEXT.encode())
    assert found.train.read(0, found.train.n_tokens).tolist() == found.tokenizer.document(TEXT)


def test_the_bpe_does_not_see_the_validation_split(prepare_text: Prepare, tmp_path: Path) -> None:
    train, val = write(tmp_path / "a.txt", "abc " * 500), write(tmp_path / "b.txt", "xyz " * 500)
    found = prepare_text(train, BPEConfig(vocab_size=262), val_files=str(val))
    assert len(found.tokenizer.encode("abc abc")) < 7 and len(found.tokenizer.encode("xyz xyz")) == 7


@pytest.mark.parametrize(("n_files", "n_lines"), [(1, 3000), (1, 30_000), (3, 3000)])
def test_a_tokenizer_for_a_few_long_texts_is_trained_on_a_part_of_them(
    prepare_text: Prepare, tmp_path: Path, n_files: int, n_lines: int
) -> None:
    """Seen to fail while a hash picked whole documents: it picked none, and the tokenizer had no more than the bytes."""
    for n in range(n_files):
        write(tmp_path / f"{n}.txt", "".join(f"line {n} of the text, {at}\n" for at in range(n_lines)))
    found = prepare_text(tmp_path / "0.txt" if n_files == 1 else tmp_path, BPEConfig(vocab_size=270, max_chars=2000), val_frac=0.2)
    assert found.tokenizer.vocab_size == 270 and len(found.tokenizer.encode("line of the text")) < 8


@pytest.mark.parametrize(("val_frac", "packed"), [(0.1, False), (0.5, False), (0.1, True)])
def test_a_tokenizer_is_trained_on_an_even_sample_of_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, val_frac: float, packed: bool
) -> None:
    """Seen to fail while the hash that holds out picked too: of less than val_frac it picked none, and the first documents were read; and
    while a packed file counted as stored, half of its text here."""
    monkeypatch.setattr("lm.data.store.sample._TRIED", 500_000)
    lines = "\n".join(json.dumps({"text": f"document {n} {random.Random(n).randbytes(500).hex()}"}) for n in range(2000))
    path = write(tmp_path / "a.jsonl", lines)
    if packed:
        path = tmp_path / "b.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode()))
    source = TextConfig(files=str(path), val_frac=val_frac).open(tmp_path)
    numbers = [int(text.split()[1]) for text in training_texts(source, lambda n: None, len(lines) // 12)]
    for fifth in range(5):
        assert 0.1 < sum(fifth * 400 <= n < fifth * 400 + 400 for n in numbers) / len(numbers) < 0.3, fifth


def test_a_second_preparation_reads_the_cache(prepare_text: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    first = prepare_text(path, BPEConfig(vocab_size=300))
    monkeypatch.setattr("lm.data.store.prepare.build_tokens", None)
    monkeypatch.setattr("lm.data.tokenizer.train.train_tokenizer", None)
    again = prepare_text(path, BPEConfig(vocab_size=300))
    assert again.fingerprint == first.fingerprint and again.tokenizer.hash == first.tokenizer.hash
    os.utime(path)  # another time, the same content
    assert prepare_text(path, BPEConfig(vocab_size=300)).fingerprint == first.fingerprint


def test_a_trained_tokenizer_that_was_replaced_is_refused(prepare_text: Prepare, tmp_path: Path) -> None:
    """Seen to fail with the comparison of hashes removed."""
    path, cfg = write(tmp_path / "a.txt", TEXT), BPEConfig(vocab_size=300)
    own = prepare_text(path, cfg).tokenizer
    other = cfg.build([TEXT[::-1]])
    (file,) = (tmp_path / "cache" / "tokenizers").rglob("tokenizer.json")
    folder = file.parent
    other.save(folder)
    assert other.vocab_size == own.vocab_size
    with pytest.raises(ConfigError, match=rf"{folder}/tokenizer.json: it is not the one that was trained here. Delete {folder}"):
        prepare_text(path, cfg)


def test_what_changes_the_tokens_changes_the_fingerprint(prepare_text: Prepare, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    first = prepare_text(path)
    others = [
        prepare_text(path, val_frac=0.2),
        prepare_text(path, seq_len=128),
        prepare_text(path, mask_documents=False),
        prepare_text(path, packing="fit"),
        prepare_text(path, BPEConfig(vocab_size=300)),
        prepare_text(write(path, TEXT.replace("text", "test", 1))),  # one byte
    ]
    assert len({found.fingerprint for found in (first, *others)}) == 7
    same = [prepare_text(write(tmp_path / "b.txt", TEXT), global_batch=4, val_rows=3, workers=2)]
    assert {found.fingerprint for found in same} == {first.fingerprint}


def test_training_and_held_out_files_can_change_places(prepare_text: Prepare, tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", TEXT), write(tmp_path / "b.txt", TEXT[:500])
    assert prepare_text(a, val_files=str(b)).train.n_bytes > 1000 > prepare_text(b, val_files=str(a)).train.n_bytes


def test_a_changed_file_is_named(prepare_text: Prepare, tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / f"{name}.txt", TEXT + name) for name in "abc")
    before = prepare_text([a, b], val_files=str(a), max_contamination=1.0)
    write(a, TEXT)
    after = prepare_text([a, c], val_files=str(a), max_contamination=1.0)
    assert changed_files(before.files, after.files) == [f"{a} has changed", f"{b} is gone", f"{c} is new"]
    assert changed_files(after.files, after.files) == []


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
@pytest.mark.parametrize("tokenizer", [BytesConfig(), BPEConfig(vocab_size=300)])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_an_empty_corpus_is_refused_with_what_was_looked_at(
    prepare_text: Prepare, tmp_path: Path, content: str, tokenizer: object, name: str
) -> None:
    """Seen to fail with the check for documents removed."""
    path = write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=rf"data: 0 documents for training in {path}. Give files with more text"):
        prepare_text(path, tokenizer)


def test_a_corpus_whose_records_are_all_broken_says_how_many_were_skipped(prepare_text: Prepare, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "{\n{\n")
    with pytest.raises(
        ConfigError, match=r"0 documents for training in .*a.jsonl \(2 records left out, broken, or with a blank text, answer or label\)"
    ):
        prepare_text(path, on_bad_record="skip")


def test_a_corpus_without_validation_documents_is_refused(prepare_text: Prepare, tmp_path: Path) -> None:
    """Seen to fail: 'Raise data.val_frac' of one record, which that holds out."""
    path = write(tmp_path / "a.jsonl", '{"text": "only"}\n')
    with pytest.raises(ConfigError, match=r"0 documents for validation in .*a.jsonl, and 1 for training. Give more documents"):
        prepare_text(path)
    some = write(tmp_path / "b.jsonl", "".join(f'{{"text": "text {i}"}}\n' for i in range(20)))
    took_all = r"0 documents for validation in .*, and \d+ for training and \d+ for the test \(data.test_frac=0.999\). Lower data.test_frac"
    with pytest.raises(ConfigError, match=took_all):
        prepare_text(some, val_frac=0.3, test_frac=0.999)


@pytest.mark.parametrize("tokenizer", [BytesConfig(), BPEConfig(vocab_size=300)])
def test_a_corpus_of_which_all_is_held_out_is_refused(prepare_text: Prepare, tmp_path: Path, tokenizer: object) -> None:
    """Seen to fail: 'Give files with text in them', and no word of what holds it out."""
    some = write(tmp_path / "a.jsonl", "".join(f'{{"text": "text {i}"}}\n' for i in range(20)))
    with pytest.raises(ConfigError, match=r"for training in .*a.jsonl, and 20 held out. Give files with more text, or lower"):
        prepare_text(some, tokenizer, val_frac=0.9999)


@pytest.mark.parametrize("tokenizer", [BytesConfig(), BPEConfig(vocab_size=300)])
def test_a_broken_record_stops_the_preparation_and_leaves_nothing(prepare_text: Prepare, tmp_path: Path, tokenizer: object) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "good"}\n' * 1233 + "{broken\n")
    with pytest.raises(ConfigError, match=r"a.jsonl:1234: the line is not JSON"):
        prepare_text(path, tokenizer)
    left = {found.name for found in (tmp_path / "cache").rglob("*") if found.is_dir()}
    assert left <= {"hashes", "tokens", "tokenizers"}


def test_an_id_outside_the_vocabulary_is_refused_before_training(prepare_text: Prepare, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", TEXT)
    prepare_text(path)
    (shard,) = (tmp_path / "cache").rglob("val-*.bin")
    tokens = np.fromfile(shard, np.uint16)
    tokens[5] = 259
    tokens.tofile(shard)
    with pytest.raises(ConfigError, match=rf"{shard}: .* token id 259, and the vocabulary has 259 ids"):
        prepare_text(path)


def test_documents_in_both_splits_are_counted_and_reported(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(10)))
    val = write(tmp_path / "b.jsonl", "".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(7, 20)))
    lines: list[str] = []
    cfg = TextConfig(files=str(train), val_files=str(val), cache_dir=str(tmp_path / "cache"))
    assert prepare(cfg, BytesConfig(), log=lines.append).parts[""].index["contamination"]["documents"] == 3
    assert any("3 training documents are in validation too" in line for line in lines)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"a.jsonl": 12},
            "val: held out is data.val_frac=0.1 of all on average, as a hash of each decides, and at least one: ",
        ),
        (
            {"a.txt": 12},
            "val: held out is data.val_frac=0.1 of the text, its end: 10% of the text here. Change that, or name data.val_files.",
        ),
        ({"a.jsonl": 400}, None),
        ({"a.jsonl": 12, "b.jsonl": 3}, None),
    ],
    ids=["a few records", "one text", "many records", "named"],
)
def test_what_a_small_file_holds_out_is_said_with_the_key_that_decides(tmp_path: Path, files: dict[str, int], expected: str | None) -> None:
    train, *val = (
        write(tmp_path / name, "".join(json.dumps({"text": f"{name} {n}"}) + "\n" for n in range(many))) for name, many in files.items()
    )
    lines: list[str] = []
    prepare(
        TextConfig(files=str(train), val_files=list(map(str, val)) or None, cache_dir=str(tmp_path / "cache")),
        BytesConfig(),
        log=lines.append,
    )
    said = [line for line in lines if "held out" in line]
    assert len(said) == (expected is not None) and said[:1] == [line for line in said if line.startswith(expected or "-")]
    assert lines[0].startswith("train: ") and " MB" not in lines[0] and not [line for line in lines if " 1 documents" in line]


@pytest.mark.parametrize(("shared", "expected"), [(3, []), (9, ["val: "])], ids=["a few", "most"])
def test_text_that_training_shares_is_told_where_it_is_most_of_the_validation(tmp_path: Path, shared: int, expected: list[str]) -> None:
    common = [f"line {n} of text that both of them have" for n in range(shared)]
    own = [[hashlib.sha256(f"{name}{n}".encode()).hexdigest() for n in range(10 - shared)] for name in "ab"]
    train, val = (write(tmp_path / f"{name}.txt", "".join(common + lines)) for name, lines in zip("ab", own, strict=True))
    lines: list[str] = []
    prepare(TextConfig(files=str(train), val_files=str(val), cache_dir=str(tmp_path / "cache")), BytesConfig(), log=lines.append)
    assert [line[:5] for line in lines if "runs of 13 tokens are in training too" in line] == expected


def test_a_validation_that_is_mostly_in_training_is_refused(tmp_path: Path) -> None:
    """Seen to fail with the check of the contamination removed."""
    records = ["".join(json.dumps({"text": f"text {n}"}) + "\n" for n in numbers) for numbers in (range(10), range(7, 11))]
    train, val = (write(tmp_path / f"{name}.jsonl", text) for name, text in zip("ab", records, strict=True))
    cfg = TextConfig(files=str(train), val_files=str(val), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"data.max_contamination=0.5: 3 of 4 validation documents are in training too"):
        prepare(cfg, BytesConfig(), log=lambda line: None)
    assert prepare(cfg.replace(max_contamination=0.8), BytesConfig(), log=print).parts[""].index["contamination"]["documents"] == 3


def test_the_usual_cache_is_replaced_by_one_in_the_temporary_folder_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    write(tmp_path / "file", "")
    lines: list[str] = []
    cfg = TextConfig(files=str(write(tmp_path / "a.txt", TEXT)), cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(ResourceError, match=r"^data\.cache_dir=.*/file/cache: it cannot be written \(Not a directory\)\. Choose a folder"):
        prepare(cfg, BytesConfig(), log=lines.append)
    monkeypatch.setattr("lm.data.store.cache.CACHE_DIR", cfg.cache_dir)
    assert prepare(cfg, BytesConfig(), log=lines.append).train.n_documents == 1
    assert f"data.cache_dir: {tmp_path}/file/cache cannot be written" in lines[0] and f"lm-cache-{os.getuid()}" in lines[0]


def test_a_cache_that_can_only_be_read_serves_for_what_is_in_it(public: Path) -> None:
    """Seen to fail: refused, though all was there."""
    cfg = TextConfig(files=str(write(public / "a.txt", TEXT)), cache_dir=str(public / "cache"))
    made = prepare(cfg, BytesConfig(), log=lambda line: None)
    other = cfg.replace(files=str(write(public / "b.txt", TEXT * 2)))
    inside = [public / "cache", *(public / "cache").rglob("*")]
    for path in (public / "a.txt", public / "b.txt", *inside):
        path.chmod(0o555 if path.is_dir() else 0 if path.parent.name == "hashes" else 0o444)
    with unprivileged():
        assert prepare(cfg, BytesConfig(), log=lambda line: None).train.n_tokens == made.train.n_tokens
        with pytest.raises(ResourceError, match=r"^data\.cache_dir: .* cannot be written \(Permission denied\)\. Make it writable or set"):
            prepare(other, BytesConfig(), log=lambda line: None)
    (public / "cache").chmod(0)
    refused = r"^data\.cache_dir=.*/cache: it cannot be written \(Permission denied\)\. Choose"
    with unprivileged(), pytest.raises(ResourceError, match=refused):
        prepare(cfg, BytesConfig(), log=lambda line: None)
    for path in inside:
        path.chmod(0o755)


def test_a_full_disk_is_a_resource_error_and_the_same_call_goes_on(prepare_text: Prepare, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", TEXT * 100)
    prepare_text(write(tmp_path / "b.txt", TEXT))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ResourceError, match=r"data.cache_dir: .* cannot be written \(File too large\)\. Raise the limit"):
            prepare_text(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert prepare_text(path).train.n_bytes > 100_000
    assert not list((tmp_path / "cache").rglob("*.half"))


def _prepare_of_two(folder: str, waits: Event, queue: "multiprocessing.Queue[tuple[str, list[str]]]") -> None:
    """Builds once the other process waits, so that neither is done before the other begins."""
    from lm.data.store import prepare as module

    build, lines = module.build_tokens, list[str]()

    def log(line: str) -> None:
        lines.append(line)
        if "waiting for it" in line:
            waits.set()

    def slow(*args: Any) -> None:
        waits.wait(20)
        lines.append("built")
        build(*args)

    setattr(module, "build_tokens", slow)  # noqa: B010
    cfg = TextConfig(files=f"{folder}/a.txt", cache_dir=f"{folder}/cache")
    queue.put((prepare(cfg, BytesConfig(), log=log).fingerprint, lines))


def test_of_two_processes_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    """Seen to fail with the lock removed."""
    write(tmp_path / "a.txt", TEXT)
    context = multiprocessing.get_context("fork")
    queue, waits = context.Queue(), context.Event()
    processes = [context.Process(target=_prepare_of_two, args=(str(tmp_path), waits, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert len({fingerprint for fingerprint, _ in found}) == 1
    assert sum("built" in lines for _, lines in found) == 1
    assert sum(any("waiting for it" in line for line in lines) for _, lines in found) == 1


def test_what_a_killed_process_left_is_removed_and_built_anew(prepare_text: Prepare, tmp_path: Path) -> None:
    """Seen to fail with the cache written in place."""
    path = write(tmp_path / "a.txt", TEXT)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_die_while_building, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and list((tmp_path / "cache" / "tokens").glob("*.half/train*"))
    found = prepare_text(path)
    assert stream(found.train, found.tokenizer) + stream(found.val, found.tokenizer) == TEXT
    assert not list((tmp_path / "cache").rglob("*.half"))


def _die_while_building(folder: str) -> None:
    from lm.data.store import finished as module

    setattr(module, "write_index", lambda *args: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010
    prepare(TextConfig(files=f"{folder}/a.txt", cache_dir=f"{folder}/cache"), BytesConfig(), log=lambda line: None)


def test_changed_code_is_another_cache_entry(prepare_text: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with the code left out of the key."""
    path = write(tmp_path / "a.txt", TEXT)
    first = prepare_text(path)
    monkeypatch.setattr("lm.data.store.prepare.code_version", lambda *foreign: "another")
    assert prepare_text(path).fingerprint == first.fingerprint
    assert len([found for found in (tmp_path / "cache" / "tokens").iterdir() if found.is_dir()]) == 2


@pytest.mark.slow
def test_long_preparation_tells_how_far_how_fast_and_how_long_off_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm.progress._SILENT_S", 0.004)
    monkeypatch.setattr("lm.progress._RARELY", (1, 2, 3))
    for name in "abcdefghijkl":  # the thread that tells may come late, and there is more to tell of
        write(tmp_path / f"{name}.txt", name + TEXT * 100)
    config = TextConfig(files=str(tmp_path / "*.txt"), cache_dir=str(tmp_path / "cache"), val_frac=0.5)
    prepare(config, BytesConfig(), log=lambda line: None)
    out, err = capsys.readouterr()
    assert not out and "\x1b" not in err
    assert re.search(r"^Tokenising: \d+ of 14 MB, [\d,]+\.\d MB/s, \d:\d\d:\d\d left$", err, re.MULTILINE)


def test_a_given_tokenizer_is_used_as_it_is(prepare_text: Prepare, tmp_path: Path) -> None:
    ours = BPEConfig(vocab_size=270).build([TEXT])
    found = prepare_text(write(tmp_path / "a.txt", TEXT), ours)
    assert found.tokenizer is ours and found.train.read(0, 9).tolist() == ours.document(TEXT)[:9]


@pytest.mark.slow
def test_a_line_of_50_mb_stays_below_1500_mb_of_memory(tmp_path: Path) -> None:
    line = json.dumps({"text": "word and word, " * (50_000_000 // 15)})
    (tmp_path / "a.jsonl").write_text(line + "\n" + json.dumps({"text": "held out"}) + "\n")
    (tmp_path / "b.txt").write_text("held out")
    code = (
        "import re; from lm.data.store.prepare import prepare; from lm.data.kinds import *\n"
        f"cfg = TextConfig(files='{tmp_path}/a.jsonl', val_files='{tmp_path}/b.txt', max_contamination=1.0, cache_dir='{tmp_path}/cache')\n"
        "found = prepare(cfg, BPEConfig(vocab_size=300), log=print)\n"
        "print(found.train.n_bytes, int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    n_bytes, peak_mib = map(int, done.stdout.splitlines()[-1].split())
    assert n_bytes > 49_000_000 and peak_mib < 1_500_000_000 >> 20


@pytest.mark.slow
def test_the_default_corpus_opens_in_seconds_and_then_at_once(tmp_path: Path) -> None:
    cfg, lines = StdlibConfig(cache_dir=str(tmp_path)), list[str]()
    began_at = time.monotonic()
    first = prepare(cfg, BPEConfig(), log=lines.append)
    built_at = time.monotonic()
    again = prepare(cfg, BPEConfig(), log=lines.append)
    assert built_at - began_at < 30 and time.monotonic() - built_at < 3
    assert first.fingerprint == again.fingerprint and first.tokenizer.vocab_size == 4096
    assert first.val.n_bytes / first.val.n_tokens > 3.3 and first.parts[""].index["contamination"]["documents"] < 5


def test_a_tokenizer_that_loses_text_only_later_is_told(tmp_path: Path) -> None:
    """Seen to fail while only the first document was decoded."""
    raw = BytesConfig().build()._raw
    content = json.loads(raw.to_str()) | {"normalizer": {"type": "Lowercase"}}
    write(tmp_path / "low.json", json.dumps(content))
    write(tmp_path / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in ["first", *(f"Then {n}" for n in range(50))]))
    lines: list[str] = []
    cfg = TextConfig(files=str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "cache"))
    prepare(cfg, TokenizerFileConfig(path=str(tmp_path / "low.json")), log=lines.append)
    assert any("decoding does not give the text back" in line for line in lines)


def test_a_tokenizer_that_loses_text_is_told(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as RawTokenizer
    from tokenizers import models, pre_tokenizers

    raw = RawTokenizer(models.WordLevel({"[UNK]": 0, "word": 1, "</s>": 2}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.save(str(tmp_path / "word.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "word"}\n' * 200 + '{"text": "other"}\n')  # the first document comes back
    said: list[str] = []
    cfg = from_tree(TextConfig, {"files": str(tmp_path / "a.jsonl"), "val_files": str(tmp_path / "a.jsonl"), "max_contamination": 1.0})
    cfg = cfg.replace(cache_dir=str(tmp_path / "cache"))
    tokenizers: list[TokenizerConfig] = [TokenizerFileConfig(path=str(tmp_path / "word.json")), BytesConfig()]
    for tokenizer in tokenizers:
        said.clear()
        prepare(cfg, tokenizer, log=said.append)
        assert any("does not give the text back" in line for line in said) == (tokenizer.kind == "file")
