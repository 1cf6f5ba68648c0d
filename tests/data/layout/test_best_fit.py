"""Best-fit packing: nothing cut, nothing lost, rows full."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from lm.data.kinds import CausalConfig, MLMConfig, Seq2SeqConfig, TextConfig
from lm.data.layout.best_fit import BestFit, best_fit
from lm.data.rows.build import build_rows
from lm.data.rows.causal import CausalRows
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.batch import IGNORED
from lm.nn.model_config import ModelConfig

MakeStore = Callable[..., TokenStore]


def slow_best_fit(lengths: list[int], width: int) -> list[list[int]]:
    """Pieces of each row, by the definition: one piece at a time."""
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(width + 1)]
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        room = next((room for room in range(lengths[piece], width + 1) if by_room[room]), None)
        row = by_room[room].pop() if room is not None else len(rows)
        if room is None:
            rows.append([])
        rows[row].append(piece)
        by_room[(width if room is None else room) - lengths[piece]].append(row)
    return rows


@pytest.mark.parametrize("longest", [64, 9, 2, 1])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_best_fit_by_definition(seed: int, longest: int) -> None:
    """Short pieces, of which several of one length go into a row, too: runs go on with the rows that they began with."""
    lengths = np.random.default_rng(seed).integers(1, longest + 1, 300)
    order, bounds = best_fit(lengths, 64)
    assert [row.tolist() for row in np.split(order, bounds[1:-1])] == slow_best_fit(lengths.tolist(), 64)


def test_of_no_pieces_there_are_no_rows() -> None:
    order, bounds = best_fit(np.empty(0, np.int64), 64)
    assert (order.tolist(), bounds.tolist()) == ([], [0])


def documents(count: int = 60, longest: int = 40) -> list[list[int]]:
    draw = np.random.default_rng(2)
    return [draw.integers(0, 250, draw.integers(1, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_documents_that_fit_are_whole_and_all_are_there_once(make_store: MakeStore, ahead: int) -> None:
    given = documents(longest=60)
    packing = BestFit(make_store(given, shard_tokens=77), 24, ahead)
    packed = packing.read(np.arange(len(packing)))
    found = [text.tolist() for row in packed.texts(following=bool(ahead)) for text in row]
    whole = [text for text in given if len(text) - ahead <= 24 and len(text) > ahead]
    assert all(text in found for text in whole)
    n_places = sum(max(0, len(text) - ahead) for text in given)
    assert sum(len(text) - ahead for text in found) == n_places == int((packed.tokens >= 0).sum())
    cut = [text for text in given if len(text) - ahead > 24]
    assert all(any(part == text[: 24 + ahead] for part in found) for text in cut)


def test_labels_are_the_next_tokens_of_the_same_document_and_rows_agree_alone(make_store: MakeStore, byte_tokenizer: Tokenizer) -> None:
    given = documents(longest=50)
    store = make_store(given)
    rows = CausalRows(store, byte_tokenizer, 24, True, BestFit(store, 24, ahead=1))
    batch = rows.batch(np.arange(len(rows)))
    assert batch.labels is not None and batch.positions is not None and batch.documents is not None
    learned = batch.labels[batch.labels != IGNORED].tolist()
    assert sorted(learned) == sorted(token for text in given for token in text[1:])
    assert ((batch.labels != IGNORED) == (batch.positions >= 0)).all()
    inner = batch.positions[:, 1:] > 0
    assert torch.equal(batch.labels[:, :-1][inner], batch.tokens[:, 1:][inner])
    for row in range(len(rows)):
        alone = rows.batch(np.array([row]))
        assert torch.equal(alone.tokens[0], batch.tokens[row]) and alone.positions is not None
        assert torch.equal(alone.positions[0], batch.positions[row])


def test_a_realistic_mixture_of_lengths_is_99_percent_full_at_2048(make_store: MakeStore) -> None:
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(6.2, 1.1, 4000).astype(int) + 2, 30_000)
    packing = BestFit(make_store([[1] * n for n in lengths]), 2048, ahead=1)
    assert packing.fill > 0.99 and "99." in packing.describe()


@pytest.mark.parametrize("objective", [CausalConfig(), MLMConfig()])
def test_the_packing_is_chosen_by_name(
    make_store: MakeStore, byte_tokenizer: Tokenizer, decoder: ModelConfig, objective: CausalConfig | MLMConfig
) -> None:
    from lm.data.kinds import BytesConfig

    tokenizer = BytesConfig().build(extra=objective.specials())
    data = TextConfig(files="x", seq_len=24)
    store = make_store(documents())
    split, fit = (build_rows(objective, data.replace(packing=how), store, tokenizer, decoder) for how in (None, "fit"))
    assert len(fit) != len(split) and "full" in fit.describe() and not split.describe()


def test_a_packing_that_does_not_fit_is_refused() -> None:
    data = TextConfig(files="x", packing="fit")
    CausalConfig().require_fit("decoder", data)
    with pytest.raises(ValueError, match=r"objective=causal packs by split or fit, and data.packing=none"):
        CausalConfig().require_fit("decoder", data.replace(packing="none"))
    with pytest.raises(ValueError, match=r"objective=causal with data.packing=fit takes each document on its own"):
        CausalConfig().require_fit("decoder", data.replace(mask_documents=False))
    with pytest.raises(ValueError, match="needs records of the kind pair"):
        Seq2SeqConfig().require_fit("decoder", data)
