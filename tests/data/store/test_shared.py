"""Tokens that are kept at a URL, by real file systems of fsspec: of this machine, of this process, and of a server that is another one."""

import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientTimeout
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lm.data.kinds import BPEConfig, BytesConfig, ChatRecord, TextConfig
from lm.data.loader import train_loader
from lm.data.rows.build import build_splits
from lm.data.rows.causal import CausalConfig
from lm.data.sizes import Sizes
from lm.data.store import prepare as preparing
from lm.data.store import shared
from lm.data.store.distributed import merge, prepare_part
from lm.data.store.prepare import Prepared, prepare
from lm.data.store.shards import ShardWriter, TokenStore
from lm.errors import ConfigError, LmError, ResourceError
from tests.conftest import unprivileged
from tests.data.store.served import served

FORK = multiprocessing.get_context("fork")
NAMES = ("alone", "one", "two", "three")
OTHER: dict[str, Callable[[bytes], bytes]] = {  # what is whole by itself
    "index.json": lambda data: b"[]",
    "tokenizer.json": lambda data: data.replace(b'"!": ', b'"!!": '),
    "tokenizer_config.json": lambda data: json.dumps(json.loads(data) | {"add_bos_token": False}).encode(),
    "hash": lambda data: b"0" * len(data),
}
TOKENIZER_FILES = [*OTHER][1:]
LEFT = ("index.json.half", ".tmp-origin.url-0a1b2c3d")
URLS = ["file://{}/kept", "memory://{}/kept"]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of them, of 8 KB each."""
    monkeypatch.setattr(ShardWriter.__init__, "__defaults__", (1 << 12, None))


@pytest.fixture(params=[*URLS, pytest.param("s3://", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"s3://{request.getfixturevalue('bucket')}/kept" if request.param == "s3://" else str(request.param.format(tmp_path))


@pytest.fixture(scope="session")
def object_store() -> Iterator[str]:
    """moto's S3, in another process."""
    for package in ("s3fs", "moto.server"):
        pytest.importorskip(package)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", port], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture
def bucket(object_store: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new one, for which the environment has address and key."""
    for name, value in (
        ("ENDPOINT_URL", object_store),
        ("ACCESS_KEY_ID", "a"),
        ("SECRET_ACCESS_KEY", "b"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    name, ends = f"b{time.monotonic_ns()}", time.monotonic() + 60
    system, _ = url_to_fs("s3://", skip_instance_cache=True)
    while True:
        try:
            system.mkdir(name)
            return name
        except OSError:  # it is just starting
            assert time.monotonic() < ends
            time.sleep(0.2)


Prepare = Callable[..., Prepared]


@pytest.fixture
def prepared(tmp_path: Path) -> Prepare:
    """prepare() of records, with a cache of this name."""
    lines = "".join(json.dumps({"text": f"record {n} " * (n % 9 + 1)}) + "\n" for n in range(400))
    (tmp_path / "a.jsonl").write_text(lines)

    def run(cache: str, remote: str | None = None, tokenizer: Any = None, **options: Any) -> Prepared:
        return prepare(config(tmp_path, cache, remote, **options), tokenizer or BytesConfig(), log=lambda line: None)

    return run


def config(folder: Path, cache: str, remote: str | None, **options: Any) -> TextConfig:
    return TextConfig(files=str(folder / "a.jsonl"), cache_dir=str(folder / cache), remote=remote, **options)


def kept(url: str) -> dict[str, bytes]:
    """What is below a URL, by name."""
    system, path = url_to_fs(url)
    system.invalidate_cache()
    return {name.removeprefix(path.rstrip("/") + "/"): system.cat_file(name) for name in system.find(path)}


def files(folder: Path) -> dict[str, bytes]:
    """What a cache holds beside locks, hashes of files, and where it is kept."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".url"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found if "hashes" not in path.parts}


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.bin"))


@pytest.mark.parametrize("tokenizer", [BytesConfig(), BPEConfig(vocab_size=300)])
def test_what_is_kept_at_a_url_is_what_a_folder_holds_to_the_byte(prepared: Prepare, tmp_path: Path, url: str, tokenizer: Any) -> None:
    """Seen to fail with a file of the cache's own put there too."""
    alone, there = prepared("alone", None, tokenizer), prepared("one", url, tokenizer)
    assert kept(url) == files(tmp_path / "alone") and len(kept(url)) >= 7
    assert there.fingerprint == alone.fingerprint


@pytest.mark.parametrize("tokenizer", [BytesConfig(), BPEConfig(vocab_size=300)])
def test_shards_come_when_they_are_read(
    prepared: Prepare, tmp_path: Path, url: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail with all of them fetched at once, and with tokens and a tokenizer that are made again."""
    first = prepared("one", url, tokenizer)
    monkeypatch.setattr(preparing, "build_tokens", None)
    monkeypatch.setattr("lm.data.tokenizer.train.train_tokenizer", None)
    found = prepared("two", url, tokenizer)
    assert found.fingerprint == first.fingerprint and shards(tmp_path / "two") == []
    assert np.array_equal(found.train.read(5000, 5100), first.train.read(5000, 5100)) and shards(tmp_path / "two") == ["train-00001.bin"]
    assert np.array_equal(found.train.read(0, found.train.n_tokens), first.train.read(0, first.train.n_tokens))
    prepared("two", url, tokenizer, verify="full")
    assert files(tmp_path / "two") == files(tmp_path / "one")


def test_records_in_parts_come_as_well(tmp_path: Path, url: str) -> None:
    chats = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]} for n in range(50)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    stores = []
    for cache in ("one", "two"):
        cfg = TextConfig(files=str(tmp_path / "chats.jsonl"), record=ChatRecord(), cache_dir=str(tmp_path / cache), remote=url)
        stores.append(prepare(cfg, BytesConfig(), log=lambda line: None).train)
    assert len(stores[0].parts) and np.array_equal(stores[0].parts, stores[1].parts)


def test_tokens_that_were_here_before_are_put_there(prepared: Prepare, tmp_path: Path, url: str) -> None:
    prepared("one")
    prepared("one", url)
    assert kept(url) == files(tmp_path / "one")
    with pytest.raises(ConfigError, match=rf"data.remote: .* is a copy of {url}/tokens/\w+, not of {url}2/tokens/\w+. Use that URL"):
        prepared("one", f"{url}2")


def test_a_cache_that_can_only_be_read_serves_for_what_is_kept_at_a_url_too(public: Path) -> None:
    """Seen to fail: refused for the lock of an upload, of which nothing was left to do."""
    (public / "a.txt").write_text("text " * 500)
    given: Any = {"files": str(public / "a.txt"), "cache_dir": str(public / "cache"), "remote": f"file://{public}/kept"}
    made = prepare(TextConfig(**given), BytesConfig(), log=lambda line: None)
    inside = [public / "cache", *(public / "cache").rglob("*")]
    for path in inside:
        path.chmod(0o555 if path.is_dir() else 0o444)
    with unprivileged():
        assert prepare(TextConfig(**given), BytesConfig(), log=lambda line: None).fingerprint == made.fingerprint
        with pytest.raises(ConfigError, match=r"data\.remote: .* is a copy of .*/kept/tokens/\w+, not of .*/other/tokens/\w+\. Use that"):
            prepare(TextConfig(**{**given, "remote": f"file://{public}/other"}), BytesConfig(), log=lambda line: None)
    for path in inside:
        path.chmod(0o755)


def test_parts_made_on_machines_that_share_a_url_alone_are_joined_to_the_same(prepared: Prepare, tmp_path: Path, url: str) -> None:
    """Seen to fail with parts that are looked for in the cache only."""
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    for n in (0, 1):
        (tmp_path / f"{n}.jsonl").write_text("".join(lines[200 * n : 200 * n + 200]))
    inputs = [str(tmp_path / f"{n}.jsonl") for n in (0, 1)]
    alone, one, two, three = (TextConfig(files=inputs, cache_dir=str(tmp_path / name), remote=url) for name in NAMES)
    silent: Any = {"log": lambda line: None}
    alone = alone.replace(remote=None)
    for part in (1, 2):
        prepare_part(alone, BytesConfig(), part, 2, **silent)
    prepare_part(one, BytesConfig(), 1, 2, **silent)
    with pytest.raises(ConfigError, match=r"merge=2: of 2 parts 1 are missing in .*part-2-of-2"):
        merge(three, BytesConfig(), 2, **silent)
    prepare_part(two, BytesConfig(), 2, 2, **silent)
    whole, joined = merge(alone, BytesConfig(), 2, **silent), merge(three, BytesConfig(), 2, **silent)
    assert joined.name == whole.name and len(kept(url)) > 18
    assert kept(url) == files(tmp_path / "alone")


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
@pytest.mark.parametrize("name", ["train-00001.bin", "train.documents.npy"])
def test_what_is_damaged_there_is_named_and_not_kept(prepared: Prepare, tmp_path: Path, url: str, harm: str, name: str) -> None:
    """Seen to fail without the comparison of checksums."""
    first = prepared("one", url).train.n_tokens
    system, path = url_to_fs(url)
    (file,) = (found for found in system.find(path) if found.endswith(name))
    data = bytearray(system.cat_file(file))
    data[-5] ^= 1
    system.rm_file(file)
    if harm != "gone":
        system.pipe_file(file, bytes(data if harm == "flipped" else data[:-2]))
    fault = "is missing, and its index names it" if harm == "gone" else "is damaged, or does not fit those beside it"
    with pytest.raises(
        ConfigError, match=rf"^{url}/tokens/\w+/{name}: the file {fault}. Delete its folder, there and below data.cache_dir"
    ):
        prepared("two", url).train.read(0, first)
    assert not [found.name for found in (tmp_path / "two").rglob("*") if found.name.startswith(name) and found.suffix != ".lock"]


@pytest.mark.parametrize(("name", "place"), [("index.json", "tokens"), *((name, "tokenizers") for name in TOKENIZER_FILES)])
@pytest.mark.parametrize("harm", ["cut", "other"])
def test_what_has_no_checksum_is_checked_as_it_comes(prepared: Prepare, tmp_path: Path, url: str, name: str, place: str, harm: str) -> None:
    """Seen to fail with every copy taken: then the sentence named the copy, which to delete did not help."""
    prepared("one", url, BPEConfig(vocab_size=300))
    system, path = url_to_fs(url)
    (file,) = (found for found in system.find(path) if found.endswith(f"/{name}"))
    data = system.cat_file(file)
    system.pipe_file(file, data[: len(data) // 2] if harm == "cut" else OTHER[name](data))
    told = "hash" if place == "tokenizers" and harm == "other" else name
    with pytest.raises(ConfigError, match=rf"^{url}/{place}/\w+/{told}: the file is damaged, or does not fit those beside it. Delete its"):
        prepared("two", url, BPEConfig(vocab_size=300))
    assert not list((tmp_path / "two" / place).glob("*/*"))


def _killed_at(name: str, folder: Path, url: str) -> None:
    put = LocalFileSystem.put_file

    def deadly(system: LocalFileSystem, file: str, to: str, **options: Any) -> None:
        if name in to:
            Path(to).write_bytes(Path(file).read_bytes()[:-9])
            os.kill(os.getpid(), signal.SIGKILL)
        put(system, file, to, **options)

    LocalFileSystem.put_file = deadly
    prepare(config(folder, "one", url), BytesConfig(), log=lambda line: None)


@pytest.mark.parametrize("name", ["train-00001.bin", "index.json"])
def test_a_killed_upload_is_not_taken_for_whole_and_goes_on(prepared: Prepare, tmp_path: Path, name: str) -> None:
    """Seen to fail with index.json put in its turn, with files that are half there, and with all of them put again."""
    url = URLS[0].format(tmp_path)
    process = FORK.Process(target=_killed_at, args=(name, tmp_path, url))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    left = [path for path in kept(url) if not path.endswith(".half")]
    assert left and not any(path.endswith(("index.json", name)) for path in left)
    assert not shared.fetched(tmp_path / "two" / Path(left[0]).parent, print, url)
    before = {path: os.stat(tmp_path / "kept" / path).st_mtime_ns for path in left}
    prepared("one", url)
    assert {path: data for path, data in kept(url).items() if not path.endswith(".half")} == files(tmp_path / "one")
    assert before == {path: os.stat(tmp_path / "kept" / path).st_mtime_ns for path in left}


def _put_slowly(folder: Path, url: str, cache: str) -> None:
    put = LocalFileSystem.put_file

    def slow(system: LocalFileSystem, file: str, to: str, **options: Any) -> None:
        put(system, file, to, **options)
        with (folder / "puts").open("a") as stream:
            stream.write(f"{Path(to).name}\n")
        time.sleep(0.05)

    LocalFileSystem.put_file = slow
    prepare(config(folder, cache, url), BytesConfig(), log=lambda line: None)


def test_of_two_processes_one_puts_there_what_was_made(prepared: Prepare, tmp_path: Path) -> None:
    """Seen to fail without the lock: then one took what the other had written away."""
    url = URLS[0].format(tmp_path)
    prepared("one")
    assert _put_by_two(tmp_path, url, "one", "one") == [0, 0] and kept(url) == files(tmp_path / "one")
    puts = (tmp_path / "puts").read_text().split()
    assert len(puts) == len(set(puts)) == len(kept(url))


def _put_by_two(folder: Path, url: str, *caches: str) -> list[int | None]:
    """Exit codes."""
    processes = [FORK.Process(target=_put_slowly, args=(folder, url, cache)) for cache in caches]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


@pytest.mark.slow
def test_two_machines_may_put_there_what_both_have_made(prepared: Prepare, tmp_path: Path) -> None:
    """Seen to fail with one name for what both write."""
    url = URLS[0].format(tmp_path)
    prepared("one"), prepared("two")
    assert _put_by_two(tmp_path, url, "one", "two") == [0, 0] and kept(url) == files(tmp_path / "one") == files(tmp_path / "two")


def test_what_killed_processes_left_in_a_folder_is_not_put_there(prepared: Prepare, tmp_path: Path, url: str) -> None:
    """Seen to fail with all of its files uploaded."""
    folder = prepared("one").parts[""].folder
    for name in LEFT:
        (folder / name).write_text("cut")
    prepared("one", url)
    assert kept(url) == {name: data for name, data in files(tmp_path / "one").items() if not name.endswith(LEFT)}


def test_what_a_killed_copy_has_left_does_not_count_as_kept(prepared: Prepare, tmp_path: Path, url: str) -> None:
    """Seen to fail with its origin left in the folder."""
    name = prepared("alone").parts[""].folder.name
    half = tmp_path / "one" / "tokens" / f"{name}.half"
    half.mkdir(parents=True)
    (half / "origin.url").write_text(f"{url}/tokens/{name}")
    prepared("one", url)
    assert kept(url) == files(tmp_path / "one") == files(tmp_path / "alone")


@pytest.fixture
def server(prepared: Prepare, tmp_path: Path) -> Iterator[Any]:
    """Serves what is prepared in the folder `kept`, in another process; `tmp_path / "slow"` makes it take 20 ms for each KB of a shard."""
    prepared("one", URLS[0].format(tmp_path))
    with served(tmp_path / "kept", tmp_path / "slow") as found:
        yield found


def _read(folder: Path, url: str, told: Any) -> None:
    try:
        store = prepare(config(folder, "two", url), BytesConfig(), log=lambda line: None).train
        told.put(store.read(0, store.n_tokens).tolist())
    except LmError as error:
        told.put(error)


@pytest.mark.slow
def test_of_two_processes_one_fetches_a_shard(prepared: Prepare, tmp_path: Path, server: Any) -> None:
    """Seen to fail without the lock."""
    (tmp_path / "slow").touch()
    told = FORK.Queue()
    readers = [FORK.Process(target=_read, args=(tmp_path, server.url, told)) for _ in range(2)]
    for reader in readers:
        reader.start()
    found = [told.get(timeout=30) for _ in readers]
    train = prepared("one").train
    assert found == [train.read(0, train.n_tokens).tolist()] * 2
    asked = [line for line in server.asked() if line.endswith(".bin")]
    assert len(asked) == len(set(asked)) == len([name for name in shards(tmp_path / "one") if "train" in name]) > 1


@pytest.mark.slow
def test_a_process_that_is_killed_while_a_shard_comes_leaves_none(prepared: Prepare, tmp_path: Path, server: Any) -> None:
    """Seen to fail with shards that are written under their own names."""
    (tmp_path / "slow").touch()
    told = FORK.Queue()
    reader = FORK.Process(target=_read, args=(tmp_path, server.url, told))
    reader.start()
    ends = time.monotonic() + 30
    while not (half := list(tmp_path.glob("two/tokens/*/train-00001.bin.half"))) or not half[0].stat().st_size:
        assert time.monotonic() < ends
        time.sleep(0.005)
    reader.kill()
    reader.join()
    assert shards(tmp_path / "two") == ["train-00000.bin"]
    (tmp_path / "slow").unlink()
    prepared("two", server.url, verify="full")
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert sum(line.endswith("train-00000.bin") for line in server.asked()) == 1


def _read_with_little_room(folder: Path, url: str, told: Any) -> None:
    prepare(config(folder, "two", url), BytesConfig(), log=lambda line: None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))
    _read(folder, url, told)


def test_a_shard_for_which_there_is_no_room_is_named(tmp_path: Path, server: Any) -> None:
    told = FORK.Queue()
    reader = FORK.Process(target=_read_with_little_room, args=(tmp_path, server.url, told))
    reader.start()
    found = told.get(timeout=30)
    assert isinstance(found, ResourceError) and "train-00000.bin: a file of 8,192 bytes is larger than one may be here" in found.sentence
    assert shards(tmp_path / "two") == []


def test_a_server_that_goes_away_is_named_by_a_loader_process_too(prepared: Prepare, tmp_path: Path, server: Any, decoder: Any) -> None:
    """Seen to fail with torch's own text of it."""
    cfg = config(tmp_path, "two", server.url, seq_len=16)
    found = prepare(cfg, BytesConfig(), log=lambda line: None)
    rows = build_splits(CausalConfig(), cfg, found, decoder, 0)[0]
    server.stop()
    order: Any = {"seed": 0, "sizes": Sizes(4), "micro_batch": 4, "rank": 0, "world": 1, "start_step": 0, "max_steps": 2}
    for workers in (0, 1):
        with pytest.raises(ResourceError, match=rf"^{server.url}/tokens/\w+/train-0000\d.bin: cannot be read \(.*\). Check the URL"):
            list(train_loader(rows, workers=workers, **order))
        assert not multiprocessing.active_children()  # seen to fail: the loader process outlived the run by a minute


def test_a_url_that_only_serves_is_refused_before_tokens_are_made(prepared: Prepare, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "build_tokens", None)
    with pytest.raises(ResourceError, match=rf"^{server.url}: cannot be written \("):
        prepared("three", server.url, val_frac=0.2)


def test_what_comes_slowly_may_take_long(prepared: Prepare, tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with the limit of a whole request, 300 s, that aiohttp has."""
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", ClientTimeout(total=0.1))
    monkeypatch.setattr("lm.storage.remote._SILENT_S", 0.15)
    (tmp_path / "slow").touch()
    store = prepared("two", server.url).train
    assert np.array_equal(store.read(0, 100), prepared("one").train.read(0, 100))


def test_a_server_that_falls_silent_is_named(prepared: Prepare, tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.storage.remote._SILENT_S", 0.1)
    (tmp_path / "slow").write_text("1")
    with pytest.raises(ResourceError, match=rf"^{server.url}/tokens/\w+/train-00000.bin: cannot be read \(.*Time.*\). Check the URL"):
        prepared("two", server.url).train.read(0, 100)


SECRET = "the URL has a password or a query, and would be kept with the run. Credentials belong in the environment."
UNFIT = {
    **dict.fromkeys(
        ["s3://key:se/c?ret@b/a", "http://key:secret@h:80/a", "s3://key:se/cret@b/a", "simplecache::http://key:secret@h/a"], SECRET
    ),
    **dict.fromkeys(["https://h/a?sig=secret", "http://key:1secret@h"], SECRET),
    "kept": "'kept' is no URL. Write one such as s3://",
    **{url: f"{url!r} names no folder by its full path. Write" for url in ("file:///", "memory://", "s3://", "file://kept", "local://a/b")},
}


@pytest.mark.parametrize("remote", UNFIT)
def test_a_url_that_is_unfit_is_refused_by_the_config(remote: str) -> None:
    """Seen to fail without the rule: secrets went into the folder of the run, and file:/// became a folder below the current one."""
    with pytest.raises(ConfigError) as caught:
        TextConfig(files="a.txt", remote=remote)
    assert caught.value.sentence.startswith(f"remote: {UNFIT[remote]}") and not re.search("secret|ret@", str(caught.value))


@pytest.mark.parametrize(
    "remote", ["http://h:80/a@b:c", "abfs://box@account.dfs.core.windows.net/a", "s3://b", "file:///a:b@c/", "hf://datasets/me/kept@main"]
)
def test_a_url_without_secrets_is_taken(remote: str) -> None:
    assert TextConfig(files="a.txt", remote=remote).remote == remote


@pytest.mark.parametrize(
    ("remote", "kind", "said"),
    [
        ("nosuch://a", ConfigError, r"nosuch://a/.*: it cannot be opened \(Protocol not known: nosuch\)"),
        ("gs://a/b", ConfigError, r"gs://a/b/.*: a package for gs:// is missing \(.*gcsfs.*\). Run: pip install gcsfs"),
        ("http://127.0.0.1:9/a", ResourceError, r"http://127.0.0.1:9/a/.*: cannot be read \(.*127.0.0.1:9.*\). Check the URL"),
    ],
)
def test_a_url_that_cannot_be_used_is_named(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch, remote: str, kind: type[LmError], said: str
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(kind, match=said):
        prepared("one", remote)


def test_a_url_is_no_cache(prepared: Prepare, tmp_path: Path) -> None:
    cfg = config(tmp_path, "one", None).replace(cache_dir="s3://bucket/lm")
    with pytest.raises(ConfigError, match=r"data.cache_dir=s3://bucket/lm: .* Write data.remote=s3://bucket/lm instead"):
        prepare(cfg, BytesConfig(), log=print)


def test_a_store_of_a_folder_that_is_kept_nowhere_opens_all_its_shards(prepared: Prepare) -> None:
    store = prepared("one").train
    for file in (folder := prepared("one").parts[""].folder).glob("train-*.bin"):
        file.unlink()
    assert store.read(0, 10).tolist()
    with pytest.raises(ConfigError, match=r"train-00000.bin: the token cache is damaged: it is missing"):
        TokenStore(folder, "train")
