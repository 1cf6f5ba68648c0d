"""Figures of labels of texts, against scikit-learn."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lm.losses.measure import balanced

measured = pytest.importorskip("sklearn.metrics")


@pytest.mark.parametrize("case", ["drawn", "one never given", "one never seen", "all guessed the same", "all right"])
def test_macro_f1_and_correlation_of_counts_are_those_of_the_guesses(case: str) -> None:
    draw = np.random.default_rng(0)
    given, guessed = draw.integers(0, 4, 200), draw.integers(0, 4, 200)
    given = given % 3 if case in ("one never given", "one never seen") else given
    guessed = guessed % 3 if case == "one never seen" else guessed * 0 + 2 if case == "all guessed the same" else guessed
    guessed = given if case == "all right" else guessed
    asked, said = (F.one_hot(torch.from_numpy(each), 4) for each in (given, guessed))
    found = balanced(torch.stack([(asked * said).sum(0), said.sum(0), asked.sum(0)], -1))
    assert found["macro_f1"] == pytest.approx(measured.f1_score(given, guessed, average="macro"))
    assert found["mcc"] == pytest.approx(measured.matthews_corrcoef(given, guessed))
