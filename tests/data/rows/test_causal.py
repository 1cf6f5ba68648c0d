from collections.abc import Callable

import numpy as np
import pytest

from lm.data.rows.causal import CausalRows
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED

MakeStore = Callable[..., TokenStore]
Row = tuple[list[int], list[int], list[int], list[int]]


def random_documents(seed: int, count: int, longest: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 250, draw.integers(1, longest + 1)).tolist() for _ in range(count)]


def reference_row(documents: list[list[int]], row: int, seq_len: int, pad: int) -> Row:
    """Tokens, labels, documents and positions of a row, one place at a time."""
    stream = [(token, number) for number, document in enumerate(documents) for token in document]
    row_of: Row = [], [], [], []
    tokens, labels, own, positions = row_of
    for at in range(row * seq_len, (row + 1) * seq_len):
        inside = at < len(stream)
        same = inside and at % seq_len > 0 and stream[at][1] == stream[at - 1][1]
        follows = at + 1 < len(stream) and stream[at + 1][1] == stream[at][1]
        tokens.append(stream[at][0] if inside else pad)
        labels.append(stream[at + 1][0] if follows else IGNORED)
        own.append((own[-1] + (not same) if own else 0) if inside else -1)
        positions.append((positions[-1] + 1 if same else 0) if inside else -1)
    return row_of


@pytest.mark.parametrize(("seed", "longest", "seq_len"), [(0, 3, 4), (1, 10, 8), (2, 40, 7), (3, 200, 16), (4, 1, 5)])
def test_rows_equal_a_place_by_place_reference(
    make_store: MakeStore, byte_tokenizer: Tokenizer, seed: int, longest: int, seq_len: int
) -> None:
    documents = random_documents(seed, 30, longest)
    rows = CausalRows(make_store(documents, shard_tokens=11), byte_tokenizer, seq_len, mask_documents=True)
    ids = np.random.default_rng(seed).permutation(len(rows))
    batch = rows.batch(ids)
    expected = [reference_row(documents, int(i), seq_len, byte_tokenizer.pad) for i in ids]
    assert batch.labels is not None and batch.documents is not None and batch.positions is not None
    found = (batch.tokens, batch.labels, batch.documents, batch.positions)
    for part, values in zip(found, zip(*expected, strict=True), strict=True):
        assert part.tolist() == list(values)


@pytest.mark.parametrize("extra", range(10))
def test_the_rows_cover_every_label_once(make_store: MakeStore, byte_tokenizer: Tokenizer, extra: int) -> None:
    document = list(range(24 + extra))
    rows = CausalRows(make_store([document]), byte_tokenizer, 8, mask_documents=True)
    labels = rows.batch(np.arange(len(rows))).labels
    assert labels is not None and labels[labels != IGNORED].tolist() == document[1:]
    assert all((row != IGNORED).any() for row in labels)


def test_the_labels_of_all_rows_stand_for_all_bytes(make_store: MakeStore, byte_tokenizer: Tokenizer) -> None:
    rows = CausalRows(make_store(random_documents(5, 40, 30)), byte_tokenizer, 8, mask_documents=False)
    labels = rows.batch(np.arange(len(rows))).labels
    assert labels is not None and int((labels != IGNORED).sum()) == rows.store.n_tokens - 40
    assert rows.bytes_per_label * (rows.store.n_tokens - 40) == pytest.approx(rows.store.n_bytes)


def test_rows_of_one_document_have_neither_documents_nor_positions(make_store: MakeStore, byte_tokenizer: Tokenizer) -> None:
    rows = CausalRows(make_store([[1] * 32, [2] * 30]), byte_tokenizer, 8, mask_documents=True)
    whole = rows.batch(np.arange(4))
    assert whole.documents is None and whole.positions is None
    assert whole.labels is not None and int(whole.labels[3, -1]) == IGNORED  # the next row begins another document
    assert rows.batch(np.array([0, 7])).documents is not None  # row 7 is padded
    assert CausalRows(rows.store, byte_tokenizer, 12, mask_documents=True).batch(np.array([2])).documents is not None
    assert CausalRows(rows.store, byte_tokenizer, 12, mask_documents=False).batch(np.array([2])).documents is None


def test_a_corpus_shorter_than_a_row_is_refused_with_both_numbers(make_store: MakeStore, byte_tokenizer: Tokenizer) -> None:
    """Seen to fail with the check removed."""
    store = make_store([[1] * 8])
    CausalRows(store, byte_tokenizer, 7, mask_documents=True)
    with pytest.raises(ConfigError, match=r"data.seq_len=8: the train split has 8 tokens, and one row needs 9"):
        CausalRows(store, byte_tokenizer, 8, mask_documents=True)
