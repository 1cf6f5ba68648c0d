"""The first tokens behind a window, against the paper's positions."""

from typing import Any

import pytest
import torch

from lm.cost.count import count
from lm.errors import ConfigError
from lm.hf.io.writing import family_for
from lm.nn.batch import Batch
from lm.nn.transformer import build_model
from lm.testing.models import tokens
from tests.nn.models import CLOSE, config, packed, redrawn

FIRST, WINDOW = 3, 6
STREAMING: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "window": WINDOW, "keep_first": FIRST}
POSITIONS: list[dict[str, Any]] = [
    {"kind": "rope"},
    {"kind": "rope", "interleaved": True, "fraction": 0.5},
    {"kind": "alibi"},
    {"kind": "t5_relative", "n_buckets": 8, "max_distance": 12},
]

pytestmark = pytest.mark.usefixtures("doubles")


@pytest.mark.parametrize("position", POSITIONS, ids=str)
@torch.no_grad()
def test_a_token_reads_the_first_and_its_window_as_a_row_of_their_own(position: dict[str, Any]) -> None:
    """Positions are those within the cache.  arXiv:2309.17453, section 3.2.  One layer: deeper keys know of what came before."""
    changes = {"n_layers": 1, "position": position}
    model, whole = redrawn(config(attention=STREAMING, **changes)), redrawn(config(attention={"n_heads": 4, "n_kv_heads": 2}, **changes))
    whole.load_state_dict(model.state_dict())
    ids = tokens(2, 60)
    out = model(ids)
    for at in range(60):
        seen = ids[:, : at + 1] if at < FIRST + WINDOW else torch.cat([ids[:, :FIRST], ids[:, at + 1 - WINDOW : at + 1]], 1)
        torch.testing.assert_close(out[:, at], whole(seen)[:, -1], **CLOSE)


@torch.no_grad()
def test_rows_as_long_as_both_together_are_read_whole() -> None:
    """So that a model of full attention may stream."""
    model, whole = redrawn(config(attention=STREAMING)), redrawn(config(attention={"n_heads": 4, "n_kv_heads": 2}))
    whole.load_state_dict(model.state_dict())
    ids = tokens(2, FIRST + WINDOW + 1)
    torch.testing.assert_close(model(ids[:, :-1]), whole(ids[:, :-1]), **CLOSE)
    assert (model(ids) - whole(ids))[:, -1].abs().max() > 0.01


@pytest.mark.parametrize("chunks", [[1] * 140, [50, *[1] * 90], [4, 30, 3, *[1] * 40, 25, *[2] * 19]], ids=["one by one", "long", "mixed"])
@torch.no_grad()
def test_a_cache_of_constant_size_goes_on_far_beyond_the_context(chunks: list[int]) -> None:
    model, ids = redrawn(config(attention=STREAMING)), tokens(2, 140)
    cache = model.new_cache(2, 1000, slack=4, horizon=model.max_seq_len)
    assert [store[0].shape[2] for store in cache.stores.values()] == [WINDOW + 4 + FIRST + 1] * 3  # one takes what is none of the first
    out = torch.cat([model(Batch(part), cache=cache) for part in ids.split(chunks, 1)], 1)
    assert out.shape[1] > 2 * model.max_seq_len
    torch.testing.assert_close(out, model(ids), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("upto", range(WINDOW + 3, WINDOW + 10))
def test_the_first_tokens_are_seen_where_tokens_are_taken_back(upto: int) -> None:
    """Seen to fail: a ring that had come round and was rewound to before that had them no more, and their own slots were not looked at."""
    model, ids = redrawn(config(attention=STREAMING)), tokens(1, 20)
    whole = model(ids)
    for n in range(1, 5):
        cache = model.new_cache(1, 1000, slack=4)
        for t in range(upto):
            model(Batch(ids[:, t : t + 1]), cache=cache)
        cache.rewind(n)
        torch.testing.assert_close(model(Batch(ids[:, upto - n : upto - n + 1]), cache=cache)[:, 0], whole[:, upto - n], **CLOSE)


@torch.no_grad()
def test_each_document_has_first_tokens_of_its_own() -> None:
    model, batch = redrawn(config(attention=STREAMING)), packed([20, 20])
    changed = Batch(batch.tokens.clone(), positions=batch.positions, documents=batch.documents)
    changed.tokens[0, 20] = (changed.tokens[0, 20] + 1) % 61
    moved = (model(batch) - model(changed))[0].abs().amax(-1) > 1e-6
    assert moved.nonzero().flatten().tolist() == [*range(20, 40)]


def test_what_is_seen_behind_the_window_is_counted() -> None:
    sizes = [count(config(attention={"n_heads": 4} | changes), 21).forward_flops_per_token for changes in (
        {"window": WINDOW}, {"window": WINDOW, "keep_first": FIRST}, {"window": WINDOW + FIRST}, {"window": 20, "keep_first": FIRST}, {}
    )]  # fmt: skip
    assert sizes[0] < sizes[1] == sizes[2] < sizes[3] == sizes[4]


def test_layers_that_see_everything_are_as_they_were_and_no_family_has_a_place_for_it() -> None:
    model = build_model(config(attention=STREAMING | {"global_every": 2}), seed=0)
    assert [type(block.attention).__name__ for block in model.blocks] == ["StreamingGQA", "GQA", "StreamingGQA"]
    with pytest.raises(ConfigError, match=r"model\.attention\.keep_first=3 must be 0"):
        family_for(config(attention=STREAMING))
