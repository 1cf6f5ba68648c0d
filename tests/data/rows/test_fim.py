"""Fill-in-the-middle and prefix rows."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from lm.data.kinds import BytesConfig, FIMConfig
from lm.data.layout.windows import Windows
from lm.data.order import Ids
from lm.data.rows.fim import FIMRows, rearranged
from lm.data.rows.prefix import PrefixRows
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.gap import SENTINELS as NAMES
from lm.data.tokenizer.gap import Gap, gap_ids
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import build_model
from lm.testing.models import redraw
from tests.nn.models import config

MakeStore = Callable[..., TokenStore]
SENTINELS = np.array([1001, 1002, 1003])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return BytesConfig().build(extra=FIMConfig().specials())


def put_back(document: Ids, sentinels: Ids) -> Ids:
    """The document that was rearranged, whichever order it has."""
    pre, suf, mid = (np.flatnonzero(document == sentinel) for sentinel in sentinels)
    if not len(pre):
        return document
    a, b, c = int(pre[0]), int(suf[0]), int(mid[0])
    head, suffix = document[:a], document[b + 1 : c]
    prefix, middle = document[a + 1 : b], document[c + 1 :]
    return np.concatenate([head, prefix, middle, suffix])


@pytest.mark.parametrize("suffix_first", [False, True])
@pytest.mark.parametrize("cuts", [(0, 0), (3, 7), (0, 10), (10, 10), (4, 4)])
def test_a_rearranged_document_can_be_put_back(suffix_first: bool, cuts: tuple[int, int]) -> None:
    text = np.arange(10)
    low, high = cuts
    found = rearranged(text[:low], text[low:high], text[high:], SENTINELS, suffix_first)
    assert len(found) == 13 and sorted(found[found > 1000].tolist()) == SENTINELS.tolist()
    parts = np.split(found, np.flatnonzero(found > 1000))
    if suffix_first:
        assert [p.tolist() for p in parts[1:]] == [[1001], [1002, *range(high, 10)], [1003, *range(high)]]
    else:
        assert [p.tolist() for p in parts[1:]] == [[1001, *range(low)], [1002, *range(high, 10)], [1003, *range(low, high)]]
    assert np.array_equal(put_back(found, SENTINELS), text)


def documents(tokenizer: Tokenizer, longest: int, count: int = 80) -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [[*tokenizer.prefix, *draw.integers(0, 256, draw.integers(1, longest)).tolist(), *tokenizer.suffix] for _ in range(count)]


def in_row(batch: Batch, row: int) -> list[Ids]:
    """Each document of a row with the token that is predicted last."""
    assert batch.documents is not None and batch.labels is not None
    found = []
    for number in range(int(batch.documents[row].max()) + 1):
        at = np.flatnonzero((batch.documents[row] == number).numpy())
        labels = batch.labels[row, at]
        assert torch.equal(labels[:-1], batch.tokens[row, at[1:]])
        found.append(torch.cat([batch.tokens[row, at], labels[-1:]]).numpy())
    return found


@pytest.mark.parametrize("longest", [20, 150])
def test_rows_hold_their_documents_moved_or_not(make_store: MakeStore, tokenizer: Tokenizer, longest: int) -> None:
    packing = Windows(make_store(documents(tokenizer, longest), vocab_size=300), 64, True, ahead=1)
    rows = FIMRows(FIMConfig(rate=0.5), packing, tokenizer, seed=1)
    sentinels = np.array([tokenizer.special([name]) for name in FIMConfig().specials()])
    ids, moved, suffix_first, kept = np.arange(len(rows)), 0, 0, 0
    batch = rows.batch(ids, draw=4)
    for row, texts in enumerate(packing.read(ids).texts(following=True)):
        for found, text in zip(in_row(batch, row), [text for text in texts if len(text) > 1], strict=False):
            ended = int(found[-1] == tokenizer.eos)
            back = np.concatenate([put_back(found[: len(found) - ended], sentinels), found[len(found) - ended :]])
            assert np.array_equal(back, text[: len(back)])  # nothing but the end of a row is lost
            kept += len(back)
            n = int((found == sentinels[0]).sum())
            moved += n
            suffix_first += n and found[np.flatnonzero(found == sentinels[0])[0] + 1] == sentinels[1]
            assert text[0] != tokenizer.bos or found[0] == tokenizer.bos
            assert len(back) < len(text) or text[-1] != tokenizer.eos or found[-1] == tokenizer.eos
    whole = [len(text) for texts in packing.read(ids).texts(following=True) for text in texts if len(text) > 1]
    assert 0.3 < moved / len(whole) < 0.6 and 0.3 < suffix_first / moved < 0.7 and 0.9 < kept / sum(whole) < 1


def test_documents_are_moved_and_put_suffix_first_as_often_as_said(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    store = make_store([[*tokenizer.prefix, *range(20), *tokenizer.suffix]] * 2000, vocab_size=300)
    rows = FIMRows(FIMConfig(rate=0.6, suffix_first=0.3), Windows(store, 22, True, ahead=1), tokenizer, seed=1)
    prefix, suffix = (tokenizer.special([name]) for name in FIMConfig().specials()[:2])
    moved = first = 0
    for draw in range(6):
        tokens = rows.batch(np.arange(len(rows) - 1), draw).tokens
        moved += int((tokens == prefix).any(1).sum())
        first += int(((tokens[:, :-1] == prefix) & (tokens[:, 1:] == suffix)).any(1).sum())
    assert moved / (6 * (len(rows) - 1)) == pytest.approx(0.6, rel=0.02)
    empty = 1 - (19 / 20) ** 2  # an empty prefix looks the same: 19 tokens are left to cut in 20 places
    assert first / moved == pytest.approx(0.3 + 0.7 * empty, abs=0.02)


def test_a_gap_is_asked_for_as_rows_have_it(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    store = make_store([[*tokenizer.prefix, *b"def f(x): return x", *tokenizer.suffix]])
    rows = FIMRows(FIMConfig(rate=1, suffix_first=0), Windows(store, 16, True, ahead=1), tokenizer, seed=1)
    tokens = rows.batch(np.arange(1)).tokens[0].tolist()
    names = {i: name for i, name in tokenizer.special_names.items() if name in NAMES}
    pre, suf, mid = (next(at for at, token in enumerate(tokens) if names.get(token) == name) for name in NAMES)
    gap = Gap(tokenizer.decode(tokens[pre:suf]), tokenizer.decode(tokens[suf:mid]))
    assert gap.prefix and gap.suffix and gap_ids(tokenizer, gap) == tokens[: mid + 1]


def test_without_moving_rows_are_those_of_next_token_prediction(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    packing = Windows(make_store(documents(tokenizer, 50), vocab_size=300), 64, True, ahead=1)
    batch = FIMRows(FIMConfig(rate=0.0), packing, tokenizer, seed=1).batch(np.arange(len(packing)))
    assert batch.labels is not None
    expected = packing.read(np.arange(len(packing))).following
    for row, labels in enumerate(batch.labels):
        assert labels[labels != IGNORED].tolist() == expected[row][expected[row] != IGNORED].tolist()


def test_a_tokenizer_without_fim_tokens_is_refused(make_store: MakeStore, byte_tokenizer: Tokenizer) -> None:
    says = r"objective=fim: the tokenizer has not all of <\|fim_prefix\|>, .* Add them by tokenizer\.specials\."
    with pytest.raises(ConfigError, match=says):
        FIMRows(FIMConfig(), Windows(make_store([[1] * 40]), 8, True, 1), byte_tokenizer, 0)


@pytest.mark.parametrize("mask", [True, False])
def test_what_a_prefix_row_predicts_is_not_seen(make_store: MakeStore, tokenizer: Tokenizer, mask: bool) -> None:
    """Changing a predicted token changes no logit up to the place that predicts it."""
    packing = Windows(make_store(documents(tokenizer, 12), vocab_size=300), 24, mask, ahead=1)
    rows = PrefixRows(packing, tokenizer, seed=1)
    model = build_model(config(vocab_size=320), seed=0).eval()
    redraw(model)
    batch = rows.batch(np.arange(6), draw=2)
    assert batch.labels is not None and batch.prefix is not None
    before = model(batch)
    checked = 0
    for row, place in torch.nonzero(batch.labels[:, :-1] != IGNORED).tolist():
        tokens = batch.tokens.clone()
        tokens[row, place + 1] = (tokens[row, place + 1] + 1) % 256
        after = model(Batch(tokens, None, batch.positions, batch.documents, prefix=batch.prefix))
        assert torch.equal(before[row, : place + 1], after[row, : place + 1])
        checked += 1
    assert checked > 30


def test_prefixes_are_even_in_length_and_leave_a_label_to_each_document(make_store: MakeStore, tokenizer: Tokenizer) -> None:
    store = make_store([[*tokenizer.prefix, *range(20), *tokenizer.suffix]] * 300, vocab_size=300)
    rows = PrefixRows(Windows(store, 22, True, ahead=1), tokenizer, seed=1)
    lengths = []
    for row in range(len(rows) - 1):
        batch = rows.batch(np.array([row]), draw=row)
        assert batch.prefix is not None and batch.labels is not None
        n = int(batch.prefix.sum())
        assert batch.prefix[0, :n].all() and (batch.labels[0, : n - 1] == IGNORED).all() and (batch.labels[0, n - 1 : 21] != IGNORED).all()
        lengths.append(n)
    counts = np.bincount(lengths, minlength=23)
    assert counts[0] == 0 == counts[22] and (counts[1:22] > 0).all() and counts.max() < 35
