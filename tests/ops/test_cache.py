"""The key/value cache beyond the invariants: rewinding, reordering, rings, and what it refuses."""

import random
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lm.nn.batch import Batch
from lm.testing.models import tokens
from tests.nn.models import ATTENTIONS, CLOSE, CONV, MIXING, MLA, config, packed, redrawn

pytestmark = pytest.mark.usefixtures("doubles")


@torch.no_grad()
def test_rewind_forgets_and_reorder_exchanges_rows() -> None:
    for attention in ({"n_heads": 4}, {"n_heads": 4, "window": 6}, {"n_heads": 4, "window": 6, "global_every": 2}):
        model = redrawn(config(attention=attention))
        ids, wrong = tokens(2, 20), tokens(2, 3, seed=9)
        full = model(Batch(ids))
        cache = model.new_cache(2, 40, slack=4)
        model(Batch(ids[:, :15], positions=torch.arange(15).expand(2, 15)), cache=cache)
        for t in range(3):
            model(Batch(wrong[:, t : t + 1], positions=torch.full((2, 1), 15 + t)), cache=cache)
        cache.rewind(3)
        assert cache.length == 15
        cache.reorder(torch.tensor([1, 0]))
        swapped = ids.flip(0)
        out = [model(Batch(swapped[:, t : t + 1], positions=torch.full((2, 1), t)), cache=cache) for t in range(15, 20)]
        torch.testing.assert_close(torch.cat(out, 1), full.flip(0)[:, 15:], **CLOSE)


def test_rows_are_exchanged_without_all_of_a_cache_there_twice() -> None:
    """Seen to fail: each row that ended took the memory of a second cache."""
    cache = redrawn(config()).new_cache(2, 40)
    old = [weakref.ref(store) for stores in cache.stores.values() for store in stores]
    left = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.index_select.default and args[0].dim() == 4:
                left.append(sum(ref() is not None for ref in old))
            return func(*args, **(kwargs or {}))

    with Count():
        cache.reorder(torch.tensor([1, 0]))
    assert left == list(range(len(old), 0, -1)) and len(old) > 2


@torch.no_grad()
def test_rewinding_a_ring_beyond_its_slack_is_refused() -> None:
    model = redrawn(config(attention={"n_heads": 4, "window": 6}))
    cache = model.new_cache(1, 40, slack=4)
    model(Batch(tokens(1, 20), positions=torch.arange(20)[None]), cache=cache)
    with pytest.raises(ValueError, match="cannot rewind 5 tokens"):
        cache.rewind(5)


def test_a_windowed_cache_does_not_grow_with_the_sequence() -> None:
    model = redrawn(config(attention={"n_heads": 4, "window": 6, "global_every": 3}))
    sizes = [store[0].shape[2] for store in model.new_cache(1, 1000, slack=4).stores.values()]
    assert sizes == [10, 10, 1000]


@torch.no_grad()
def test_a_cache_continues_by_itself_and_refuses_what_it_cannot_hold() -> None:
    model = redrawn(config())
    ids = tokens(2, 12)
    cache = model.new_cache(2, 12)
    out = [model(Batch(ids[:, i:j]), cache=cache) for i, j in ((0, 7), (7, 8), (8, 12))]
    torch.testing.assert_close(torch.cat(out, 1), model(Batch(ids)), **CLOSE)
    with pytest.raises(ValueError, match=r"the cache holds 12 tokens, and 12 \+ 1 are too many"):
        model(Batch(ids[:, :1]), cache=cache)
    with pytest.raises(ValueError, match="one document a row"):
        model(packed([3, 4]), cache=model.new_cache(1, 12))


@torch.no_grad()
def test_rewinding_a_ring_twice_counts_from_its_furthest_token() -> None:
    model = redrawn(config(attention={"n_heads": 4, "window": 6}))
    cache = model.new_cache(1, 40, slack=4)
    model(Batch(tokens(1, 20)), cache=cache)
    cache.rewind(3)
    with pytest.raises(ValueError, match="cannot rewind 2 tokens"):
        cache.rewind(2)
    cache.rewind(1)


RAGGED = [
    {},
    {"attention": {"n_heads": 4, "window": 6, "global_every": 2}},
    {"attention": {"n_heads": 4, "window": 3}},
    {"attention": {"n_heads": 4, "window": 3, "keep_first": 2}},
    {"attention": {"n_heads": 4, "window": 3, "chunked": True, "global_every": 2}},
    {"attention": {"n_heads": 4, "n_kv_heads": 2, "window": 6, "global_every": 2, "forget": True}, "position": {"kind": "none"}},
    {"recurrent": CONV, "pattern": ["recurrent", "attention"]},
    {"attention": MLA},
]


@pytest.mark.parametrize("changes", RAGGED, ids=str)
@torch.no_grad()
def test_rows_that_forget_and_go_on_each_by_its_own_number_are_as_whole_rows(changes: dict[str, Any]) -> None:
    model, ids, draw = redrawn(config(**changes)), tokens(3, 40), random.Random(0)
    full, cache, done = model(Batch(ids)), model.new_cache(3, 46, slack=5), [7, 7, 7]
    model(Batch(ids[:, :7], positions=torch.arange(7).expand(3, 7)), cache=cache)
    while max(done) < 36:
        guessed = [draw.randint(0, 4) for _ in done]  # right, before one that is wrong and padding
        at = [[n + i if i < guess + 2 else -1 for i in range(5)] for n, guess in zip(done, guessed, strict=True)]
        read = [
            [int(row[i]) if 0 <= i - n < guess else 3 for i in each] for row, each, n, guess in zip(ids, at, done, guessed, strict=True)
        ]
        out = model(Batch(torch.tensor(read), positions=torch.tensor(at)), cache=cache)
        for row, (n, guess) in enumerate(zip(done, guessed, strict=True)):
            torch.testing.assert_close(out[row, :guess], full[row, n : n + guess], **CLOSE)
        cache.rewind([5 - guess for guess in guessed])
        done = [n + guess for n, guess in zip(done, guessed, strict=True)]
        assert cache.lengths == done
        if draw.random() < 0.2:
            rows = draw.sample(range(3), 3)
            cache.reorder(torch.tensor(rows))
            ids, full, done = ids[rows], full[rows], [done[row] for row in rows]


@torch.no_grad()
def test_rows_of_several_caches_go_on_in_one() -> None:
    for changes in ({"attention": ATTENTIONS[4]}, *({"attention": each} for each in ATTENTIONS[10:12]), MIXING[1]):
        model, ids = redrawn(config(**changes)), tokens(3, 30)
        caches = []
        for rows, n in ((ids[:2], 20), (ids[2:], 9)):
            caches.append(model.new_cache(len(rows), 40, slack=2))
            model(Batch(rows[:, :n], positions=torch.arange(n).expand(len(rows), n)), cache=caches[-1])
        cache = model.new_cache(3, 40, slack=2)
        caches[0].rewind([2, 0])  # its rows are of two lengths
        cache.adopt([(caches[0], [0]), (caches[1], [0, 0])], 20)
        for t in range(5):
            step = torch.stack([ids[0, 18 + t], ids[2, 9 + t], ids[2, 9 + t]])[:, None]
            out = model(Batch(step, positions=torch.tensor([[18 + t], [9 + t], [9 + t]])), cache=cache)
            for row, (text, length) in enumerate(((ids[0], 19 + t), (ids[2], 10 + t), (ids[2], 10 + t))):
                torch.testing.assert_close(out[row, -1], model(Batch(text[None, :length]))[0, -1], **CLOSE)
