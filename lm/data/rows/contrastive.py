"""Rows of texts that belong together, each a group of pairs within which every text is compared with all."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Annotated, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from lm.data.order import Ids, in_epochs
from lm.data.records.base import GIVEN
from lm.data.rows.base import Material, ObjectiveConfig, Rows
from lm.data.rows.reading import Reading, batch_of
from lm.data.rows.seq2seq import rounded
from lm.errors import ConfigError
from lm.losses.contrastive import Contrastive
from lm.losses.embeddings import InParts
from lm.losses.measure import Measure, Start
from lm.nn.batch import IGNORED, Batch
from lm.nn.model_config import ModelConfig
from lm.units import counted


class ContrastiveConfig(ObjectiveConfig):
    """Make the vectors of two texts that belong together more alike than those of texts that do not: an embedding model (Reimers and
    Gurevych 2019, arXiv:1908.10084; with the other pairs' texts as negatives, Henderson et al. 2017, arXiv:1705.00652, section 4)."""

    models = ("encoder", "decoder")
    shapes = ("alike",)
    usual_for = ("alike",)
    packings = ("none",)
    needs_masked_documents = True
    trains_mtp = False
    trains_head = False
    reads_model = True

    kind: Literal["contrastive"] = "contrastive"
    among: int = Field(16, gt=1)
    """Pairs of a group, which is a row: the second texts of all are what each first text is compared with. More are harder to tell apart;
    whole groups go into a micro-batch."""
    temperature: float = Field(0.05, gt=0)
    """By which cosines are divided (SimCSE, arXiv:2104.08821: 0.05; E5, arXiv:2212.03533: 0.01)."""
    both_ways: bool = False
    """Half of the loss is of second texts, which are to find their first ones (CLIP, arXiv:2103.00020)."""
    first_dims: list[Annotated[int, Field(gt=0)]] = []
    """The first so many numbers of a vector are to serve as one, too: the loss is the mean over these and the whole (Matryoshka, Kusupati
    et al. 2022, arXiv:2205.13147)."""
    parts: int = Field(2, gt=0)
    """The texts of a micro-batch, sorted by their lengths, are read in so many parts, each as wide as its longest text."""
    recompute: bool = False
    """Only vectors are kept of the parts, and the backward reads each once more (Gao et al. 2021, arXiv:2101.06983): the memory of one
    part, for a third more time."""

    @model_validator(mode="after")
    def _parts_have_texts(self) -> Self:
        if self.parts > 2 * self.among:
            raise ValueError(f"parts={self.parts} is more than the {2 * self.among} texts of a row. Lower it.")
        return self

    @model_validator(mode="after")
    def _first_dims_differ(self) -> Self:
        if twice := [d for d in self.first_dims if self.first_dims.count(d) > 1]:
            raise ValueError(f"first_dims: {twice[0]} is there more than once. Name it once.")
        return self

    @property
    def texts(self) -> int:
        return 2 * self.among

    def headed(self, model: ModelConfig) -> ModelConfig:
        """The model as it is: its head is not read, but model.head.pooling says what is the vector of a text."""
        if beyond := [d for d in self.first_dims if d >= model.d_model]:
            raise ValueError(f"objective.first_dims: {beyond[0]} is not less than model.d_model={model.d_model}. Lower or remove it.")
        return model

    def measure(self, start: Start | None) -> Measure:
        return Contrastive(self.among, self.temperature, self.both_ways, InParts(self.parts, self.recompute), self.first_dims)

    @property
    def reads_again(self) -> bool:
        return self.recompute

    def held(self, rows: int) -> int:
        return -(-super().held(rows) // (self.parts if self.recompute else 1))

    def decides(self, figure: str) -> object:
        return (self.among, self.temperature, self.both_ways, *self.first_dims) if figure in ("loss", "ece") else self.among

    def rows(self, of: Material) -> Rows:
        return ContrastiveRows(self, of)


class ContrastiveRows(Rows):
    """Row i is the i-th group of an endless order, in which every epoch is another permutation of the pairs; `len` counts those of one. It
    becomes the rows of a batch that `Contrastive` takes, a text each, with the number of each anchor in its group as its label.

    The end of a text that is longer than data.seq_len is left out, and counted.
    """

    uneven = True

    def __init__(self, cfg: ContrastiveConfig, of: Material) -> None:
        store, self._seq_len, self._pad, self._seed, self._among = of.store, of.data.seq_len, of.tokenizer.pad, of.seed, cfg.among
        if store.n_documents < cfg.among:
            few = f"the {store.split} split has {counted(store.n_documents, 'pair')}, and objective.among={cfg.among} compares so many"
            raise ConfigError(f"data: {few}. Lower objective.among, give more data, or set data.val_frac for a larger part held out.")
        self._store, self._reading = store, Reading(of.model, of.tokenizer, self._seq_len)
        at, kinds = store.parts.T
        self._first = np.append(np.flatnonzero(kinds == GIVEN), len(at))  # part at which each pair begins; the last one ends there
        self._n_pairs, self._begins = store.n_documents, np.append(at, store.n_tokens)
        self._lengths = np.diff(self._begins) + self._reading.added(pair=False)
        self._longest = np.minimum(np.maximum.reduceat(self._lengths, self._first[:-1]), self._seq_len)  # text of each pair
        self._n_texts = np.diff(self._first)
        self.n_labels = len(self) * cfg.among

    def __len__(self) -> int:
        return self._n_pairs // self._among

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """The batch is as wide as its longest text."""
        rows = [[*pairs, *(pairs + 1), *self._negatives(pairs)] for pairs in self._first[self._pairs(ids)]]
        read = [self._reading.read(self._store.read(*self._begins[part : part + 2].tolist()).astype(np.int64)) for part in chain(*rows)]
        batch = batch_of([[each] for each in read], rounded(max(len(each.ids) for each in read)), self._pad)
        batch.labels, batch.lengths = torch.full_like(batch.tokens, IGNORED), [len(each.ids) for each in read]
        for start in np.cumsum([0, *map(len, rows[:-1])]).tolist():
            for number in range(self._among):
                batch.labels[start + number, self._reading.place(len(read[start + number].ids))] = number
        return batch

    def at(self, seed: int, places: range, first: int | None = None) -> Ids:
        """Returns the next groups of the order; where only the `first` are read, these over and over."""
        if first is not None:
            return super().at(seed, places, first)
        return np.arange(places.start, places.stop, dtype=np.int64)

    def widths(self, ids: Ids) -> Sequence[Ids]:
        """Of each row the tokens with padding, and the longest text."""
        pairs = self._pairs(ids)
        longest = self._longest[pairs].max(-1)
        return [longest * self._n_texts[pairs].sum(-1), longest]

    def label_bytes(self, tokenizer: object) -> None:
        """Of pairs, which are what is told apart, and no text."""

    def label_names(self) -> Sequence[str]:
        return [str(number) for number in range(1, self._among + 1)]

    def describe(self) -> str:
        n, cut = self._n_pairs, int((self._lengths > self._seq_len).sum())
        longest = f"; {counted(cut, 'text')} cut (the longest has {int(self._lengths.max()):,} tokens; raise data.seq_len)" if cut else ""
        further = len(self._lengths) - 2 * n
        beside = f" and {counted(further, 'negative')}" if further else ""
        return f"{self._store.split}: {counted(n, 'pair')}{beside} in {counted(len(self), 'row')} of {self._among} pairs{longest}"

    def _pairs(self, ids: Ids) -> Ids:
        """(rows, among) the pairs of each group."""
        places = ids[:, None] * self._among + np.arange(self._among)
        return in_epochs(places.ravel(), self._n_pairs, self._seed).reshape(places.shape)

    def _negatives(self, pairs: Ids) -> Iterable[int]:
        """Returns the parts that are negatives of pairs.  pairs: the part at which each begins."""
        ends = self._first[np.searchsorted(self._first, pairs) + 1]
        return chain.from_iterable(range(begin + 2, end) for begin, end in zip(pairs.tolist(), ends.tolist(), strict=True))
