"""Rows of texts of which numbers are told: one of any size, or of each label whether it is right."""

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lm.data.order import Ids
from lm.data.rows.base import Material, ObjectiveConfig, Rows
from lm.data.rows.labelled import LabelledRows, label_texts, no_label, numbered, same, with_labels
from lm.errors import ConfigError
from lm.losses.measure import Measure, Start
from lm.losses.targets import BinaryCrossEntropy, SquaredError, TargetLoss
from lm.nn.batch import Batch
from lm.nn.model_config import ModelConfig

SCORE = "score"  # the name of the number that a regression tells

Table = NDArray[np.float32]


class TargetConfig(ObjectiveConfig):
    """What objectives share that tell numbers of a text, at the token at which objective=classify tells its label."""

    models = ("encoder", "decoder")
    shapes = ("label",)
    packings = ("fit", "none")
    needs_masked_documents = True
    reads_model = True

    @abstractmethod
    def loss(self) -> TargetLoss:
        """Returns the loss, which is what a validation measures too."""

    def measure(self, start: Start | None) -> Measure:
        return self.loss()


class RegressionConfig(TargetConfig):
    """Tell a number of a text: how alike two sentences are, how many stars a review gives (transformers' problem_type=regression)."""

    kind: Literal["regression"] = "regression"

    def headed(self, model: ModelConfig) -> ModelConfig:
        """The model as it is where it tells one number already, whatever that is called: LABEL_0 in transformers."""
        return model if model.head.tells_number() else with_labels(model, [SCORE])

    def loss(self) -> TargetLoss:
        return SquaredError()

    def rows(self, of: Material) -> Rows:
        told = of.model.head.labels if of.model is not None and of.model.head.tells_number() else None
        return RegressionRows(of, _number, told or [SCORE])


class MultiLabelConfig(TargetConfig):
    """Tell of each label whether it is right of a text; several may be, or none (transformers'
    problem_type=multi_label_classification)."""

    kind: Literal["multi_label"] = "multi_label"
    labels: list[str] | None = None
    """Names of the labels, in the order of their numbers, as which the data may have them. They get a new head as those of
    objective=classify do, unless the model tells the same. null: model.head.labels, of a model that tells several already."""

    def headed(self, model: ModelConfig) -> ModelConfig:
        head = model.head
        if self.labels is not None and not (head.several and same(self.labels, head.labels)):
            return with_labels(model, self.labels, several=True)
        if not head.several:
            raise ValueError("objective=multi_label has no names for what is told. Set objective.labels=[sport,politics], say.")
        return model

    def loss(self) -> TargetLoss:
        return BinaryCrossEntropy()

    def rows(self, of: Material) -> Rows:
        told = (of.model.head.labels if of.model is not None and of.model.head.several else None) or []
        labels = self.labels or told
        names = told if same(labels, told) else labels
        return MultiLabelRows(of, _Marks(labels, names), names)


class TargetRows(LabelledRows):
    """Texts with numbers to tell. The label at a text's place says only that there are some: they are the batch's `targets`."""

    def __init__(self, of: Material, read: Callable[[str, str, Sequence[str]], Sequence[float]], names: Sequence[str]) -> None:
        """read: returns the numbers of a label.  names: of the numbers."""
        found, self._which = np.unique(label_texts(of.store), return_inverse=True)
        self._table: Table = np.array([read(label, of.store.split, found.tolist()) for label in found.tolist()], np.float32)
        super().__init__(of, names, np.zeros(len(self._which), np.int64))

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        batch, of = super().batch(ids, draw), [self._numbers(self._of_row(i)) for i in ids]
        targets = np.zeros((len(of), max(map(len, of)), len(self._names)), np.float32)
        for row, numbers in zip(targets, of, strict=True):
            row[: len(numbers)] = numbers
        batch.targets = torch.from_numpy(targets)
        return batch

    def _numbers(self, texts: Ids) -> Table:
        """(texts, names)."""
        return self._table[self._which[texts]]


class RegressionRows(TargetRows):
    """Texts with a number."""

    def _spread(self, texts: Ids) -> str:
        numbers = self._numbers(texts)
        return f"numbers from {numbers.min():g} to {numbers.max():g}, {numbers.mean(dtype=np.float64):.4g} on average"


class MultiLabelRows(TargetRows):
    """Texts with any number of labels."""

    def _spread(self, texts: Ids) -> str:
        part = self._numbers(texts).mean(0, dtype=np.float64)
        return f"{part.sum():.2f} labels in each, '{self._names[int(part.argmax())]}' in {part.max():.1%} of them"


def _number(label: str, split: str, there: Sequence[str]) -> list[float]:
    """Returns the number of a label, as a list of one."""
    with suppress(ValueError):
        if abs(number := float(label)) <= np.finfo(np.float32).max:  # not so of NaN
            return [number]
    other = "multi_label" if label.startswith("[") else "classify"
    raise ConfigError(f"data: the label '{label}' of the {split} split is no number. Fix the records, or set objective={other}.")


class _Marks:
    """Makes of a label 1 for each of its names, and 0 for all others."""

    def __init__(self, labels: Sequence[str], told: Sequence[str]) -> None:
        """labels: in the order of the data's numbers.  told: the same in the order of the model's."""
        self._labels, self._known = labels, {name: told.index(labels[number]) for name, number in numbered(labels).items()}

    def __call__(self, label: str, split: str, there: Sequence[str]) -> list[float]:
        names = _names(label)
        if strange := [name for name in names if name not in self._known]:
            raise no_label(strange[0], split, self._labels, sorted({name for each in there for name in _names(each)}))
        places = [self._known[name] for name in names]
        either = len(there) == len(_EITHER) and {*there} == _EITHER
        fault = "has one twice" if len({*places}) < len(places) else "is of all labels, as every other is" if either else None
        if fault is not None:
            rule = "names or numbers of those that are right are needed, not 0 or 1 for each"
            raise ConfigError(f"data: the label {label:.60} of the {split} split {fault}; {rule}. Fix the records.")
        return [float(place in places) for place in range(len(self._labels))]


_EITHER = {'["0", "1"]', '["1", "0"]'}  # all that data of two labels have where one of them is right, by a 0 or 1 for each


def _names(label: str) -> list[str]:
    """Returns the names in a label: one, or a list as JSON."""
    found: Any = label
    with suppress(ValueError):
        found = json.loads(label) if label.startswith("[") else label
    return [str(name) for name in found] if isinstance(found, list) else [label]
