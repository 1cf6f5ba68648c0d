"""What the validation split shares with the training split."""

from collections.abc import Callable

import numpy as np

from lm.data.store.contamination import contamination
from lm.data.store.shards import TokenStore

MakeStore = Callable[..., TokenStore]


def test_shared_runs_and_documents_are_those_of_a_plain_search(make_store: MakeStore, monkeypatch: object) -> None:
    draw = np.random.default_rng(0)
    val = [draw.integers(0, 900, draw.integers(5, 60)).tolist() for _ in range(60)]
    train = [draw.integers(0, 900, draw.integers(5, 60)).tolist() for _ in range(80)]
    train[3], train[9] = val[10], val[20]
    long = next(text for text in val if len(text) > 40)
    train[30] = [*train[30], *long[11:24], 5]  # 13 in a row
    train[31] = [*train[31], *long[2:14]]  # 12 in a row
    train[32] = [*val[40][-7:], *val[41][:7]]  # only across two documents

    def runs(text: list[int]) -> set[tuple[int, ...]]:
        return {tuple(text[at : at + 13]) for at in range(len(text) - 12)}

    known = set().union(*map(runs, train))
    held = set().union(*map(runs, val))
    found = contamination(make_store(train, shard_tokens=91), make_store(val, shard_tokens=83))
    assert found.documents == found.copies == sum(text in val for text in train) == 2
    assert (found.runs, found.shared) == (len(held), len(held & known)) and found.shared > 1 and found.val_documents == 60


def test_slices_lose_no_run(make_store: MakeStore) -> None:
    import lm.data.store.contamination as module

    text = np.random.default_rng(1).integers(0, 900, 500).tolist()
    train, val = make_store([text]), make_store([text[at : at + 13] for at in range(0, 480, 16)])
    kept = module._SLICE
    try:
        for size in (1, 7, 64):
            module._SLICE = size
            assert contamination(train, val).shared == 30
    finally:
        module._SLICE = kept


def test_short_splits_have_no_runs(make_store: MakeStore) -> None:
    assert contamination(make_store([[1] * 30]), make_store([[1] * 5])) == (0, 0, 1, 0, 0, 13)
