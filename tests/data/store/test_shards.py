import errno
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lm.data.store.shards import TokenStore
from lm.errors import ConfigError, ResourceError

MakeStore = Callable[..., TokenStore]
DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7], list(range(100, 125))]
STREAM = [token for document in DOCUMENTS for token in document]


@pytest.mark.parametrize("shard_tokens", [1, 3, 7, 32, 1000])
def test_any_range_reads_the_same_from_any_shards(make_store: MakeStore, shard_tokens: int) -> None:
    store = make_store(DOCUMENTS, shard_tokens=shard_tokens)
    assert (store.n_tokens, store.n_documents, store.n_bytes) == (32, 3, 32)
    assert store.starts.tolist() == [0, 5, 7]
    for start in range(33):
        for stop in range(start, 35):
            assert store.read(start, stop).tolist() == STREAM[start:stop]


@pytest.mark.parametrize(("vocab_size", "item"), [(65_536, 2), (65_537, 4)])
def test_ids_take_two_bytes_while_they_fit(make_store: MakeStore, tmp_path: Path, vocab_size: int, item: int) -> None:
    store = make_store([[0, vocab_size - 1]], vocab_size)
    assert (tmp_path / "train-00000.bin").stat().st_size == 2 * item
    assert store.read(0, 2).tolist() == [0, vocab_size - 1]


def test_a_store_travels_to_another_process_by_its_path(make_store: MakeStore) -> None:
    store = make_store([list(range(900))] * 50)
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data).read(0, 45_000), store.read(0, 45_000))


def test_an_id_outside_the_vocabulary_names_the_shard(make_store: MakeStore) -> None:
    """Seen to fail with the check of ids removed."""
    store = make_store(DOCUMENTS, shard_tokens=10)
    compare: list[Callable[[int], None]] = [store.verify, lambda vocab_size: store.sample(vocab_size, seed=0)]
    for each in compare:
        each(125)
        with pytest.raises(ConfigError, match=r"train-00003.bin: .* token id 124, and the vocabulary has 124 ids"):
            each(124)


@pytest.mark.parametrize("place", [0, 400, 799])
def test_a_sample_sees_both_ends_and_other_blocks_with_other_seeds(
    make_store: MakeStore, tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of the 98 blocks between the ends: a seed in sixteen picks a given one. Seen to fail with the same blocks for every seed."""
    monkeypatch.setattr("lm.data.store.shards._BLOCK", 8)
    store = make_store([list(range(800))])
    store.verify(1000)
    flip(tmp_path / "train-00000.bin", 2 * place)
    with pytest.raises(ConfigError, match=r"train-00000.bin: .* has another checksum than the index says"):
        store.verify(1000)
    seen = [is_named(partial(store.sample, 1000, seed)) for seed in range(100)]
    assert all(seen) if place != 400 else 2 <= sum(seen) <= 14


def test_all_of_a_store_is_where_its_documents_start_too(make_store: MakeStore, tmp_path: Path) -> None:
    make_store(DOCUMENTS)
    flip(tmp_path / "train.documents.npy", -8)
    with pytest.raises(ConfigError, match=r"train.documents.npy: .* has another checksum than the index says"):
        TokenStore(tmp_path, "train").verify(1000)


def flip(file: Path, at: int) -> None:
    """One bit of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def is_named(compare: Callable[[], None]) -> bool:
    try:
        compare()
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("name", ["train-00001.bin", "train.documents.npy", "index.json"])
def test_a_missing_file_is_named(make_store: MakeStore, tmp_path: Path, name: str) -> None:
    make_store(DOCUMENTS, shard_tokens=10)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=f"{name}: the token cache is damaged.*Delete {tmp_path}"):
        TokenStore(tmp_path, "train")


@pytest.mark.parametrize("reader", ["numpy.load", "mmap.mmap"])
def test_a_file_that_cannot_be_opened_is_not_damaged(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """Seen to fail: with too many open files the advice was to delete a sound cache."""
    make_store(DOCUMENTS)

    def refused(*args: object, **options: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(reader, refused)
    with pytest.raises(ResourceError, match=r": cannot be read \(Too many open files\). Raise the limit \(ulimit -n\), and start again"):
        TokenStore(tmp_path, "train").read(0, 1)


@pytest.mark.parametrize("name", ["train-00001.bin", "train.documents.npy", "index.json"])
def test_a_truncated_file_is_named(make_store: MakeStore, tmp_path: Path, name: str) -> None:
    make_store(DOCUMENTS, shard_tokens=10)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-3])
    with pytest.raises(ConfigError, match=f"{name}: the token cache is damaged"):
        TokenStore(tmp_path, "train")
