"""The program that tells what a recipe's loss is to be compared with."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.nn.batch import IGNORED, Batch
from lm.training.run import train_rank
from tests.training.conftest import Configure
from tests.training.test_kinds import of_kind
from tools.baselines import ExchangedSources, baselines, label_counts, unigram_loss


class Fixed:
    """Four rows: labels i, i and 9, source i."""

    bytes_per_label = 1.0

    def __len__(self) -> int:
        return 4

    def batch(self, ids: np.ndarray, draw: int = 0) -> Batch:
        at = torch.from_numpy(ids)[:, None]
        labels = torch.cat([at, at, torch.full_like(at, 9), torch.full_like(at, IGNORED)], dim=1)
        return Batch(labels, labels, source_tokens=at, source_positions=torch.zeros_like(at))

    def describe(self) -> str:
        return ""


def test_labels_are_counted_and_ignored_ones_are_not() -> None:
    assert label_counts(Fixed(), np.array([0, 2, 2]), 10).tolist() == [2, 0, 4, 0, 0, 0, 0, 0, 0, 3]


def test_unigram_loss_is_the_mean_of_minus_log_frequency_with_one_added() -> None:
    found = unigram_loss(np.array([3, 0, 5]), np.array([2, 1, 1]))
    assert found == pytest.approx(-(2 * math.log(4 / 11) + math.log(1 / 11) + math.log(6 / 11)) / 4)


def test_every_row_gets_the_source_of_another_and_keeps_its_labels() -> None:
    ids = np.arange(4)
    batch, own = ExchangedSources(Fixed()).batch(ids), Fixed().batch(ids)
    assert batch.labels is not None and batch.source_tokens is not None
    assert torch.equal(batch.labels, own.labels)
    lent = batch.source_tokens.flatten().tolist()
    assert sorted(lent) == [0, 1, 2, 3] and not [i for i, other in enumerate(lent) if i == other]


class Packed(Fixed):
    """A batch of one row has one document, where more rows have two."""

    def batch(self, ids: np.ndarray, draw: int = 0) -> Batch:
        found = super().batch(ids, draw)
        places = torch.arange(4).expand(len(ids), -1)
        documents = None if int(ids[0]) == 0 else (places > 1).int()
        sources = None if int(ids[0]) == 0 else torch.zeros(len(ids), 1, dtype=torch.int32)
        return replace(found, positions=places, documents=documents, source_documents=sources)


@pytest.mark.parametrize("row", range(4))
def test_rows_of_several_documents_get_the_source_of_a_row_of_one_and_the_other_way_round(row: int) -> None:
    """Seen to fail with the documents of the sources handed on as they are."""
    found = ExchangedSources(Packed()).batch(np.array([row]))
    assert (found.documents is None) == (found.source_documents is None)
    assert found.documents is None or found.documents.tolist() == ([[0, 0, 1, 1]] if row else [[0, 0, 0, 0]])
    assert found.source_documents is None or found.source_documents.tolist() == [[0]]


class Prefixed(Fixed):
    """The first token is a prefix."""

    def batch(self, ids: np.ndarray, draw: int = 0) -> Batch:
        found = super().batch(ids, draw)
        return replace(found, prefix=torch.arange(4).expand(len(ids), -1) == 0)


def test_every_row_gets_the_prefix_of_another_and_keeps_the_rest() -> None:
    ids = np.arange(4)
    found, own = ExchangedSources(Prefixed()).batch(ids).tokens, Prefixed().batch(ids).tokens
    assert torch.equal(found[:, 1:], own[:, 1:]) and (found[:, 0] != own[:, 0]).all()


def test_a_run_that_learned_is_below_its_start(configure: Configure, tmp_path: Path) -> None:
    train_rank(of_kind(configure("optim=adamw", "optim.lr=0.01"), "encoder_decoder", tmp_path))
    found = baselines(tmp_path / "run")
    assert list(found) == ["unigram", "at the start", "at the end", "with the sources of other rows"]
    assert found["at the start"] > 5 > found["at the end"] and 0 < found["unigram"] < found["at the start"]
    assert found["with the sources of other rows"] != found["at the end"]
