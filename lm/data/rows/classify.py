"""Rows of texts of several kinds: which one a text, or a pair of texts, is of."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from lm.data.order import Ids
from lm.data.rows.base import LikelihoodConfig, Material, ObjectiveConfig, Rows
from lm.data.rows.labelled import LabelledRows, label_texts, no_label, numbered, same, with_labels
from lm.data.sources.base import SPLITS
from lm.data.store.shards import TokenStore
from lm.losses.measure import Choices, Measure, Start
from lm.nn.model_config import ModelConfig

_NONE = "-1"  # the label of a text that has none, in what `datasets` writes


class ClassifyConfig(LikelihoodConfig):
    """Tell which kind a text is of, at its first token (encoder; Devlin et al. 2018, arXiv:1810.04805, section 4.1) or its last one
    (decoder; Radford et al. 2018, "Improving language understanding by generative pre-training")."""

    models = ("encoder", "decoder")
    shapes = ("label",)
    usual_for = ("label",)
    packings = ("fit", "none")
    needs_masked_documents = True
    answers = True
    reads_model = True

    kind: Literal["classify"] = "classify"
    labels: list[str] | None = None
    """Names of what is told apart, in the order of their numbers, as which the data may have them. They get a head of their own, unless the
    model tells the same apart, in whatever order: without scale and softcap, and with a bias in an encoder alone; in place of BERT's layer
    before tokens, a dense layer with tanh (with relu as in DistilBERT, without segments). null: model.head.labels, of a model that is a
    classifier already."""

    def headed(self, model: ModelConfig) -> ModelConfig:
        head = model.head
        if self.labels is not None and len(self.labels) < 2:
            rule = "objective=regression tells a number, objective=multi_label whether one label fits"
            raise ValueError(f"objective.labels={self.labels} tells nothing apart. Name two or more; {rule}.")
        if self.labels is not None and (head.several or not same(self.labels, head.labels)):
            return with_labels(model, self.labels)
        if len(head.labels or []) < 2:
            raise ValueError("objective=classify has no names for what is told apart. Set objective.labels=[negative,positive], say.")
        if head.several:
            rule = "of the model's labels several may be right at once, and objective=classify tells which one is"
            raise ValueError(f"{rule}. Set objective=multi_label, or objective.labels for a new head.")
        return model

    def measure(self, start: Start | None) -> Measure:
        return Choices()

    def why_not_context_parallel(self) -> str | None:
        return ObjectiveConfig.why_not_context_parallel(self)

    def rows(self, of: Material) -> Rows:
        told = (of.model.head.labels if of.model is not None else None) or []
        labels = self.labels or told
        return ClassifyRows(of, labels, told if same(labels, told) else labels)


class ClassifyRows(LabelledRows):
    """Texts with one label of several."""

    def __init__(self, of: Material, labels: Sequence[str], told: Sequence[str]) -> None:
        """labels: in the order of the data's numbers.  told: the same in the order of the model's."""
        places = np.array([*(told.index(name) for name in labels), -1])  # the last one is of what has no label
        super().__init__(of, told, places[_classes(of.store, labels)])

    def _spread(self, texts: Ids) -> str:
        counts = np.bincount(self._classes[texts], minlength=len(self._names))
        most = int(counts.argmax())
        return f"{counts[most] / len(texts):.1%} of them '{self._names[most]}'"

    def _left_out(self) -> str:
        n = int((self._classes < 0).sum())
        return f"; {n:,} left out, whose label {_NONE} is none" if n else ""


def _classes(store: TokenStore, labels: Sequence[str]) -> Ids:
    """Returns the number of each text's label. Raises ConfigError where one is not among the labels, and tells those that there are. -1 is
    none, and no number, where it is no name and all labels occur in the data, in whatever split."""
    found, which = np.unique(label_texts(store), return_inverse=True)
    known = dict(numbered(labels))
    if _NONE in {*found.tolist()} - {*known}:
        there = {
            known.get(name) for split in SPLITS if (beside := TokenStore(store.folder, split)).n_documents for name in label_texts(beside)
        }
        known |= {} if {*range(len(labels))} - there else {_NONE: -1}
    if strange := [name for name in found.tolist() if name not in known]:
        raise no_label(strange[0], store.split, labels, found.tolist())
    return np.array([known[name] for name in found.tolist()])[which]
