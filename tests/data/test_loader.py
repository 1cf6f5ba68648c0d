import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from lm.data.loader import eval_batches, micro_batches, train_loader, worker_faults
from lm.data.order import rows_at
from lm.data.rows.causal import CausalRows
from lm.data.sizes import Sizes
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError, ResourceError
from lm.nn.batch import IGNORED, Batch

SEQ_LEN, GLOBAL_BATCH = 8, 12


@pytest.fixture
def rows(make_store: Callable[..., TokenStore], byte_tokenizer: Tokenizer) -> CausalRows:
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 250, draw.integers(1, 60)).tolist() for _ in range(40)]
    return CausalRows(make_store(documents), byte_tokenizer, SEQ_LEN, mask_documents=True)


def load(
    rows: CausalRows, *, micro_batch: int = 5, rank: int = 0, world: int = 1, start: int = 0, stop: int = 20, workers: int = 0
) -> list[Batch]:
    options: dict[str, Any] = {"rank": rank, "world": world, "start_step": start, "max_steps": stop, "workers": workers}
    loader = train_loader(rows, seed=3, sizes=Sizes(GLOBAL_BATCH), micro_batch=micro_batch, **options)
    found = list(loader)
    assert len(found) == len(loader)
    return found


def by_step(ranks: list[list[Batch]], accumulation: int) -> list[list[int]]:
    """The tokens of each step, of which each rank in turn has a micro-batch."""
    in_turn = [batch.tokens for turn in zip(*ranks, strict=True) for batch in turn]
    n = accumulation * len(ranks)
    return [torch.cat(in_turn[i : i + n]).flatten().tolist() for i in range(0, len(in_turn), n)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 5, 100])
def test_a_step_reads_the_same_rows_over_any_ranks_and_micro_batches(rows: CausalRows, world: int, micro_batch: int) -> None:
    size, accumulation = micro_batches(GLOBAL_BATCH, world, micro_batch)
    ranks = [load(rows, micro_batch=micro_batch, rank=rank, world=world) for rank in range(world)]
    assert all(len(batch.tokens) == size for batches in ranks for batch in batches)
    expected = [rows.batch(rows_at(3, Sizes(GLOBAL_BATCH).places(step), len(rows))).tokens.flatten().tolist() for step in range(20)]
    assert by_step(ranks, accumulation) == expected


@pytest.mark.parametrize(("world", "micro_batch"), [(1, 12), (1, 4), (2, 2), (3, 1)])
def test_step_tokens_are_the_labels_of_the_ranks_whole_step(rows: CausalRows, world: int, micro_batch: int) -> None:
    _, accumulation = micro_batches(GLOBAL_BATCH, world, micro_batch)
    for rank in range(world):
        batches = load(rows, micro_batch=micro_batch, rank=rank, world=world)
        for at in range(0, len(batches), accumulation):
            step = batches[at : at + accumulation]
            labels = [batch.labels for batch in step if batch.labels is not None]
            assert {batch.step_tokens for batch in step} == {sum(int((part != IGNORED).sum()) for part in labels)}


def test_workers_change_nothing(rows: CausalRows) -> None:
    here, elsewhere = load(rows, stop=6), load(rows, stop=6, workers=2)
    assert len(here) == len(elsewhere)
    for ours, theirs in zip(here, elsewhere, strict=True):
        assert ours.labels is not None and theirs.labels is not None
        assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.labels, theirs.labels)
        assert ours.step_tokens == theirs.step_tokens and (ours.documents is None) == (theirs.documents is None)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_run_that_begins_at_any_step_reads_what_the_whole_one_does_there(rows: CausalRows, world: int) -> None:
    """Over three epochs; with another accumulation than before. Seen to fail with the order begun anew."""
    n_steps = 3 * len(rows) // GLOBAL_BATCH + 1
    whole = by_step([load(rows, rank=rank, world=world, stop=n_steps) for rank in range(world)], micro_batches(GLOBAL_BATCH, world, 5)[1])
    for start in range(0, n_steps + 1, 7):
        rest = [load(rows, micro_batch=1, rank=rank, world=world, start=start, stop=n_steps) for rank in range(world)]
        assert by_step(rest, micro_batches(GLOBAL_BATCH, world, 1)[1]) == whole[start:]


def test_split_uses_the_most_rows_that_divide() -> None:
    assert micro_batches(12, 1, 12) == (12, 1)
    assert micro_batches(12, 1, 5) == (4, 3)
    assert micro_batches(12, 2, 100) == (6, 1)
    assert micro_batches(7, 1, 6) == (1, 7)


def test_a_batch_that_the_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.global_batch=10 is not a multiple of the 4 ranks"):
        micro_batches(10, 4, 8)


def _lose_a_worker(rows: CausalRows, told: "multiprocessing.Queue[tuple[int, str]]") -> None:
    loader = train_loader(rows, seed=0, sizes=Sizes(4), micro_batch=4, rank=0, world=1, start_step=0, max_steps=10**6, workers=1)
    try:
        with worker_faults():
            batches = iter(loader)
            next(batches)
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid or 0, signal.SIGKILL)
            list(batches)
    except ResourceError as error:
        told.put((worker.pid or 0, str(error)))


def test_a_killed_worker_is_an_error_that_names_it(rows: CausalRows) -> None:
    """Seen to fail with torch's error passed on."""
    context = multiprocessing.get_context("fork")
    for patience in (3, 15, 30):  # s: forked from a process with threads, it may have a lock that nobody frees
        told = context.Queue()
        process = context.Process(target=_lose_a_worker, args=(rows, told))
        process.start()
        with suppress(Empty):
            pid, message = told.get(timeout=patience)
            break
        process.kill()
        process.join()
    process.join()
    assert re.search(rf"data.workers: DataLoader worker \(pid\(?s?\)? ?{pid}\).* set data.workers=0", message)


@pytest.mark.parametrize("fault", [ConnectionResetError, ConnectionRefusedError, EOFError])
def test_a_worker_that_dies_while_it_hands_over_a_batch_is_an_error_too(
    rows: CausalRows, fault: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of the two ways a killed worker shows is a race; this is the one that the kill above meets about every third time."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(CausalRows, "batch", Mock(side_effect=fault("gone")))
    with pytest.raises(ResourceError, match=r"data.workers: DataLoader worker \(pid unknown\) has died \(gone\)"):
        load(rows)


def test_other_errors_pass_by() -> None:
    with pytest.raises(RuntimeError, match="shape"), worker_faults():
        raise RuntimeError("shape")


def test_eval_batches_keep_the_order_and_every_row(rows: CausalRows) -> None:
    ids = np.arange(len(rows))[::-1].copy()
    batches = list(eval_batches(rows, ids, 5))
    assert torch.equal(torch.cat([batch.tokens for batch in batches]), rows.batch(ids).tokens)
    assert all(batch.step_tokens == int((batch.labels != IGNORED).sum()) for batch in batches if batch.labels is not None)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize("idle", [True, False])
def test_batches_that_come_while_a_gpu_computes_are_not_waited_for(rows: CausalRows, idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Mock(query=lambda: idle))
    given: dict[str, Any] = {"seed": 3, "sizes": Sizes(4), "micro_batch": 4, "rank": 0, "world": 1, "start_step": 0, "max_steps": 5}
    loader = train_loader(rows, **given, workers=0, pinned=True)
    assert len(list(loader)) == 5 and (loader.waited_s > 0) is idle
