import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lm.data.store.shards import TokenStore
from lm.errors import ConfigError

MakeStore = Callable[..., TokenStore]
DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7], list(range(100, 125))]
STREAM = [token for document in DOCUMENTS for token in document]


@pytest.mark.parametrize("shard_tokens", [1, 3, 7, 32, 1000])
def test_any_range_reads_the_same_from_any_shards(make_store: MakeStore, shard_tokens: int) -> None:
    store = make_store(DOCUMENTS, shard_tokens=shard_tokens)
    assert (store.n_tokens, store.n_documents, store.n_bytes) == (32, 3, 32)
    assert store.starts.tolist() == [0, 5, 7]
    for start in range(32):
        for stop in range(start + 1, 35):
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


def test_an_id_outside_the_vocabulary_names_the_shard(make_store: MakeStore, tmp_path: Path) -> None:
    """Seen to fail with the check of ids removed."""
    store = make_store(DOCUMENTS, shard_tokens=10)
    store.verify(125, tmp_path / "verified")
    with pytest.raises(ConfigError, match=r"train-00003.bin: .* token id 124, and the vocabulary has 124 ids"):
        store.verify(124, tmp_path / "verified")


@pytest.mark.parametrize("name", ["train-00001.bin", "train.documents.npy", "index.json"])
def test_a_missing_file_is_named(make_store: MakeStore, tmp_path: Path, name: str) -> None:
    make_store(DOCUMENTS, shard_tokens=10)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=f"{name}: the token cache is damaged.*Delete {tmp_path}"):
        TokenStore(tmp_path, "train")


@pytest.mark.parametrize("name", ["train-00001.bin", "train.documents.npy", "index.json"])
def test_a_truncated_file_is_named(make_store: MakeStore, tmp_path: Path, name: str) -> None:
    make_store(DOCUMENTS, shard_tokens=10)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-3])
    with pytest.raises(ConfigError, match=f"{name}: the token cache is damaged"):
        TokenStore(tmp_path, "train")
