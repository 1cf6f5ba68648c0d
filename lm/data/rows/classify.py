"""Rows of texts with labels: which of several kinds a text, or a pair of texts, is of is read off at one of its tokens."""

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from lm.data.layout.best_fit import best_fit
from lm.data.layout.examples import side_by_side
from lm.data.order import Ids
from lm.data.rows.base import LikelihoodConfig, Material, ObjectiveConfig, Rows, widest
from lm.data.rows.reading import Read, Reading, batch_of
from lm.data.rows.seq2seq import rounded
from lm.data.sources.base import SPLITS
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.losses.measure import Choices, Measure
from lm.nn.batch import IGNORED, Batch
from lm.nn.transformer import LM, ModelConfig
from lm.units import counted

_MOST_TOLD = 256
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

    kind: Literal["classify"] = "classify"
    labels: list[str] | None = None
    """Names of what is told apart, in the order of their numbers, as which the data may have them. They get a head of their own, unless the
    model tells the same apart, in whatever order: without scale and softcap, and with a bias in an encoder alone; in place of BERT's layer
    before tokens, a dense layer with tanh (with relu as in DistilBERT, without segments). null: model.head.labels, of a model that is a
    classifier already."""

    def headed(self, model: ModelConfig) -> ModelConfig:
        head = model.head
        if self.labels is not None and len(self.labels) < 2:
            raise ValueError(f"objective.labels={self.labels} tells nothing apart. Name two or more.")
        if self.labels is not None and not _same(self.labels, head.labels):
            if head.transform not in (None, "tanh", "relu") and head.transform_bias and head.transform_norm:  # ModernBERT's has no bias
                head = head.replace(transform="relu" if model.embed.segments is None else "tanh", transform_norm=False)
            return model.replace(head=head.telling(self.labels, bias=model.kind == "encoder"))
        if len(model.head.labels or []) < 2:
            raise ValueError("objective=classify has no names for what is told apart. Set objective.labels=[negative,positive], say.")
        return model

    def measure(self, parent: Callable[[], LM] | None) -> Measure:
        return Choices()

    def why_not_context_parallel(self) -> str | None:
        return ObjectiveConfig.why_not_context_parallel(self)

    def rows(self, of: Material) -> Rows:
        told = (of.model.head.labels if of.model is not None else None) or []
        labels = self.labels or told
        return ClassifyRows(of, labels, told if _same(labels, told) else labels)


class ClassifyRows(Rows):
    """Whole texts, or pairs of them, side by side (best fit), or one per row. A text of no tokens is left out."""

    def __init__(self, of: Material, labels: Sequence[str], told: Sequence[str]) -> None:
        """labels: in the order of the data's numbers.  told: the same in the order of the model's."""
        store, seq_len, self._packed = of.store, of.data.seq_len, of.packed == "fit"
        if not store.n_documents:
            raise ConfigError(f"data: the {store.split} split has 0 texts. Give more data.")
        self._store, self._pad, self._seq_len, self._labels = store, of.tokenizer.pad, seq_len, told
        self._reading = Reading(of.model, of.tokenizer, seq_len)
        parts = _begins(store)
        places = np.array([*(told.index(name) for name in labels), -1])  # the last one is of what has no label
        self._parts, self._classes = parts, places[_classes(store, labels)]
        self._whole = parts[:, -1] - parts[:, 0] + self._reading.added(pair=parts.shape[1] > 2)
        kept = np.flatnonzero((self._whole > 0) & (self._classes >= 0))
        if not len(kept):
            raise ConfigError(f"data: the {store.split} split has 0 texts with a label. Give more data.")
        lengths = np.minimum(self._whole[kept], seq_len)
        one_by_one: tuple[Ids, Ids] = np.arange(len(kept)), np.arange(len(kept) + 1)
        order, self._bounds = best_fit(lengths, seq_len) if self._packed else one_by_one
        self._texts = kept[order]
        self.n_labels = len(kept)
        self.bytes_per_label = store.n_bytes / store.n_documents

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """Packed rows are all data.seq_len wide; others are as wide as the longest of the batch."""
        read = [[self._text(text) for text in self._of_row(i)] for i in ids]
        width = self._width(ids)
        labels = [[self._labelled(text) for text in self._of_row(i)] for i in ids]
        return batch_of(read, width, self._pad, side_by_side(labels, width, IGNORED))

    def documents(self, ids: Ids) -> Ids:
        of = [[np.full(self._length(text), text) for text in self._of_row(i)] for i in ids]
        found: Ids = side_by_side(of, self._width(ids), -1).numpy()
        return found

    def widest(self, n: int) -> Ids:
        return super().widest(n) if self._packed else widest(n, np.minimum(self._whole[self._texts], self._seq_len))

    def label_bytes(self, tokenizer: Tokenizer) -> None:
        """Of the labels' names."""

    def label_names(self) -> Sequence[str]:
        return self._labels

    def describe(self) -> str:
        counts = np.bincount(self._classes[self._texts], minlength=len(self._labels))
        most = int(counts.argmax())
        cut = int((self._whole > self._seq_len).sum())
        longer = f"; {cut:,} cut (the longest has {int(self._whole.max()):,} tokens; raise data.seq_len)" if cut else ""
        what = "pair" if self._parts.shape[1] > 2 else "text"
        told = f"{counted(len(self._texts), what)} in {counted(len(self), 'row')} of {self._seq_len} tokens"
        n = int((self._classes < 0).sum())
        none = f"; {n:,} left out, whose label {_NONE} is none" if n else ""
        return f"{self._store.split}: {told}, {counts[most] / len(self._texts):.1%} of them '{self._labels[most]}'{longer}{none}"

    def _of_row(self, row: int) -> Ids:
        return self._texts[self._bounds[row] : self._bounds[row + 1]]

    def _length(self, text: int) -> int:
        return min(int(self._whole[text]), self._seq_len)

    def _width(self, ids: Ids) -> int:
        if self._packed:
            return self._seq_len
        return min(self._seq_len, rounded(max(self._length(text) for row in ids for text in self._of_row(row))))

    def _text(self, text: int) -> Read:
        begins = self._parts[text].tolist()
        return self._reading.read(*(self._store.read(*span).astype(np.int64) for span in pairwise(begins)))

    def _labelled(self, text: int) -> Ids:
        n = self._length(text)
        found = np.full(n, IGNORED)
        found[self._reading.place(n)] = self._classes[text]
        return found


def _classes(store: TokenStore, labels: Sequence[str]) -> Ids:
    """Returns the number of each text's label. Raises ConfigError where one is not among the labels, and tells those that there are. -1 is
    none, and no number, where it is no name and all labels occur in the data, in whatever split."""
    found, which = np.unique(_names(store), return_inverse=True)
    numbers = {name: number for number, name in enumerate(labels)}
    numbered = not any(name.lstrip("+-").isdecimal() for name in labels)  # of 1 to 5 stars, 1 is the first and not the second
    known = {str(number): number for number in range(len(labels)) if numbered} | numbers
    if _NONE in {*found.tolist()} - {*known}:
        there = {known.get(name) for split in SPLITS if (beside := TokenStore(store.folder, split)).n_documents for name in _names(beside)}
        known |= {} if {*range(len(labels))} - there else {_NONE: -1}
    if strange := [name for name in found.tolist() if name not in known]:
        raise ConfigError(
            f"data: the label '{strange[0]}' of the {store.split} split is not in objective.labels={_listed(labels)}. Add it, or fix the"
            f" records; those of this split are {_listed(found.tolist())}."
        )
    return np.array([known[name] for name in found.tolist()])[which]


def _names(store: TokenStore) -> list[str]:
    """Returns the label of each text."""
    begins, ends = _begins(store)[:, -1], np.append(store.starts[1:], store.n_tokens)
    return [bytes(store.read(int(begin), int(end)).astype(np.uint8)).decode() for begin, end in zip(begins, ends, strict=True)]


def _begins(store: TokenStore) -> Ids:
    """Returns (texts, parts): where a text, a second one, if any, and the label begin."""
    return store.parts[:, 0].reshape(store.n_documents, -1)


def _same(labels: Sequence[str], told: Sequence[str] | None) -> bool:
    return sorted(labels) == sorted(told or [])


def _listed(labels: Sequence[str]) -> str:
    """Returns labels as a list that the command line takes."""
    plain = [name if re.fullmatch(r"[\w.+-][\w .+-]*", name) else json.dumps(name, ensure_ascii=False) for name in labels[:_MOST_TOLD]]
    return f"[{','.join([*plain, *(['...'] if len(labels) > _MOST_TOLD else [])])}]"
