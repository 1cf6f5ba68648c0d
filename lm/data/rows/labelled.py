"""Rows of texts, or of pairs of texts, each with a label that is read off at one of its tokens."""

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from lm.data.layout.best_fit import best_fit
from lm.data.layout.examples import side_by_side
from lm.data.order import Ids
from lm.data.rows.base import Material, Rows
from lm.data.rows.reading import Read, Reading, batch_of
from lm.data.rows.seq2seq import rounded
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch
from lm.nn.head import HeadConfig
from lm.nn.model_config import ModelConfig
from lm.units import counted

_MOST_TOLD = 256
_OTHER = {r"\[": ", or set objective=multi_label for several at once", r"-?\d*\.\d": ", or set objective=regression for numbers"}


def with_labels(model: ModelConfig, labels: list[str], several: bool = False) -> ModelConfig:
    """Returns the model with a new head for these labels, as `ClassifyConfig.labels` tells it."""
    return model.replace(head=_before_labels(model).telling(labels, bias=model.kind == "encoder", several=several))


def _before_labels(model: ModelConfig) -> HeadConfig:
    """Returns the head with what stands before labels in the class of transformers whose model this is, in place of what stands before
    tokens, or of nothing in an encoder without a head."""
    head, norm = model.head, model.norm
    body = model.kind == "encoder" and head.labels is None and head.tied and head.transform is None and not head.bias
    if body and norm.place == "pre" and model.position.kind == "rope":
        return head.replace(transform="gelu", transform_bias=False) if norm.kind == "layer" else head  # ModernBERT, and those of ours
    if not body and (head.transform in (None, "tanh", "relu") or not head.transform_bias or not head.transform_norm):
        return head
    electra = model.embed.factorized is not None and model.residual.kind == "plain"
    deberta = getattr(model.attention, "disentangled", None) is not None or model.position.kind == "none"
    act = "gelu" if electra or deberta else "relu" if model.embed.segments is None else "tanh"  # DistilBERT has none, BERT and ALBERT have
    return head.replace(transform=act, transform_norm=False)


class LabelledRows(Rows):
    """Whole texts, or pairs of them, side by side (best fit), or one per row. A text of no tokens is left out."""

    def __init__(self, of: Material, names: Sequence[str], classes: Ids) -> None:
        """names: of the logits.  classes: the label of each text at its place, a number; -1: none, and the text is left out."""
        store, seq_len, self._packed = of.store, of.data.seq_len, of.packed == "fit"
        self._store, self._pad, self._seq_len, self._names, self._classes = store, of.tokenizer.pad, seq_len, names, classes
        self._reading = Reading(of.model, of.tokenizer, seq_len)
        self._parts = parts = _begins(store)
        self._whole = parts[:, -1] - parts[:, 0] + self._reading.added(pair=parts.shape[1] > 2)
        kept = np.flatnonzero((self._whole > 0) & (classes >= 0))
        if not len(kept):
            raise ConfigError(f"data: the {store.split} split has 0 texts with a label. Give more data.")
        lengths = np.minimum(self._whole[kept], seq_len)
        one_by_one: tuple[Ids, Ids] = np.arange(len(kept)), np.arange(len(kept) + 1)
        order, self._bounds = best_fit(lengths, seq_len) if self._packed else one_by_one
        self._texts = kept[order]
        self.n_labels = len(kept)

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

    def widths(self, ids: Ids) -> Sequence[Ids]:
        return () if self._packed else [np.minimum(self._whole[self._texts[ids]], self._seq_len)]

    def label_bytes(self, tokenizer: Tokenizer) -> None:
        """Of labels that are no text."""

    def label_names(self) -> Sequence[str]:
        return self._names

    def describe(self) -> str:
        cut = int((self._whole > self._seq_len).sum())
        longer = f"; {cut:,} cut (the longest has {int(self._whole.max()):,} tokens; raise data.seq_len)" if cut else ""
        what = "pair" if self._parts.shape[1] > 2 else "text"
        told = f"{counted(len(self._texts), what)} in {counted(len(self), 'row')} of {self._seq_len} tokens"
        return f"{self._store.split}: {told}, {self._spread(self._texts)}{longer}{self._left_out()}"

    @abstractmethod
    def _spread(self, texts: Ids) -> str:
        """Returns what the labels of these texts are, in words."""

    def _left_out(self) -> str:
        """Returns which texts were left out for their labels, in words."""
        return ""

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


def label_texts(store: TokenStore) -> list[str]:
    """Returns the label of each text, as its record has it. Raises ConfigError where there is no text."""
    if not store.n_documents:
        raise ConfigError(f"data: the {store.split} split has 0 texts. Give more data.")
    begins, ends = _begins(store)[:, -1], np.append(store.starts[1:], store.n_tokens)
    return [bytes(store.read(int(begin), int(end)).astype(np.uint8)).decode() for begin, end in zip(begins, ends, strict=True)]


def _begins(store: TokenStore) -> Ids:
    """Returns (texts, parts): where a text, a second one, if any, and the label begin."""
    return store.parts[:, 0].reshape(store.n_documents, -1)


def numbered(labels: Sequence[str]) -> Mapping[str, int]:
    """Returns the number of each label, by its name and, where no name is a number, by the number as text."""
    names = {name: number for number, name in enumerate(labels)}
    numbers = not any(name.lstrip("+-").isdecimal() for name in labels)  # of 1 to 5 stars, 1 is the first and not the second
    return {str(number): number for number in range(len(labels)) if numbers} | names


def same(labels: Sequence[str], told: Sequence[str] | None) -> bool:
    """Whether these are the same labels, in whatever order."""
    return sorted(labels) == sorted(told or [])


def no_label(name: str, split: str, labels: Sequence[str], there: Sequence[str]) -> ConfigError:
    """Returns the error for a label that is not among those of the objective.  there: those of the split."""
    other = next((said for starts, said in _OTHER.items() if re.match(starts, name)), "")
    return ConfigError(
        f"data: the label '{name}' of the {split} split is not in objective.labels={listed(labels)}. Add it, or fix the"
        f" records{other}; those of this split are {listed(there)}."
    )


def listed(labels: Sequence[str]) -> str:
    """Returns labels as a list that the command line takes."""
    plain = [name if re.fullmatch(r"[\w.+-][\w .+-]*", name) else json.dumps(name, ensure_ascii=False) for name in labels[:_MOST_TOLD]]
    return f"[{','.join([*plain, *(['...'] if len(labels) > _MOST_TOLD else [])])}]"
