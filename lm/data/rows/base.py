"""What every objective answers and every kind of rows offers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from lm.data.config import DataConfig
from lm.data.layout.best_fit import BestFit
from lm.data.layout.examples import Example
from lm.data.layout.windows import Packing, Windows
from lm.data.order import Ids, step_rows
from lm.data.records.base import LEARNED, OTHER
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.losses.measure import Answers, Measure
from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.schema import Slot

ModelKind = Literal["decoder", "encoder", "encoder_decoder"]
_MOST_DROPPED = 0.05


class Rows(ABC):
    """Rows by id. What is random in them is a function of (seed, draw, row id, column): draw is the step, and 0 in a validation."""

    n_labels: int  # of this split
    bytes_per_label: float  # of text, on average in this split: for tokenizers whose tokens are not bytes

    @abstractmethod
    def __len__(self) -> int:
        """How many."""

    @abstractmethod
    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """These rows in this order."""

    def widest(self, n: int) -> Ids:
        """n rows, repeated where there are fewer, that make as wide a batch as any n. Here all are of one width."""
        return np.resize(np.arange(min(n, len(self)), dtype=np.int64), n)

    def documents(self, ids: Ids) -> Ids | None:
        """(b, s) which document of the split each label is of; None where that is not told, and a row stands for itself."""
        return None

    def describe(self) -> str:
        """Lines on what was cut or left empty; '' where there is nothing to say."""
        return ""

    def of_step(self, seed: int, step: int, global_batch: int, first: int | None = None) -> Ids:
        """The row ids of a step, counted from 0.  first: so many rows are read again and again; None: all."""
        return step_rows(seed, step, global_batch, len(self), first)

    def consumed(self, n: int, seq_len: int) -> dict[str, float]:
        """Of each source of a mixture the tokens and epochs in the first n rows of a run, as metrics; nothing of a single source."""
        return {}


@dataclass(frozen=True)
class Material:
    """What the rows of one split are made of.

    packed: by `split`, `fit` or `none`.  start: what the decoder of an encoder-decoder begins with; None: a model without one.
    """

    store: TokenStore
    tokenizer: Tokenizer
    data: DataConfig
    packed: str
    start: int | None = None
    seed: int = 0

    def packing(self, ahead: int) -> Packing:
        """Returns how documents are laid into rows.  ahead: 1 where a last token is only ever predicted, and takes no place; else 0."""
        if self.packed == "fit":
            return BestFit(self.store, self.data.seq_len, ahead)
        return Windows(self.store, self.data.seq_len, self.data.mask_documents, ahead)


class ObjectiveConfig(Slot, group="objective"):
    """What every objective shares."""

    models: ClassVar[tuple[ModelKind, ...]] = ("decoder",)
    shapes: ClassVar[tuple[str, ...]] = ("text",)
    packings: ClassVar[tuple[str, ...]] = ("split",)
    """Those that it can be given, the usual one first."""
    needs_masked_documents: ClassVar[bool] = False
    needs_parent: ClassVar[bool] = False
    """Whether the loss compares with the model that training starts from."""
    own_answers: ClassVar[bool] = False
    """Whether it learns from what the model itself has drawn."""
    usual_for: ClassVar[tuple[str, ...]] = ()
    """Models, and records that are no texts, that mostly serve this."""

    def measure(self, parent: Callable[[], LM] | None) -> Measure:
        """Returns what a validation measures a model by.  parent: gives the model that training started from; None: it is not known."""
        return Measure()

    def unsliced(self) -> str | None:
        """Returns why ranks cannot hold a row in slices, with the remedy; None where the loss is a sum over tokens."""
        return f"objective={self.kind} needs whole rows in one rank. Set it to 1"

    @abstractmethod
    def rows(self, of: Material) -> Rows:
        """Returns the rows that this objective makes of one split. ConfigError where there are none, or a token is missing."""

    def specials(self) -> tuple[str, ...]:
        """Special tokens that a tokenizer made for this objective needs beside bos, eos and pad."""
        return ()

    def require_fit(self, model: str, data: DataConfig) -> None:
        """ValueError where this objective cannot train such a model, or not on such data."""
        name, shape = self.kind, data.shape
        if model not in self.models:
            raise ValueError(
                f"objective={name} trains model.kind={' or '.join(self.models)}, and model.kind={model}."
                f" Choose another model, or objective={' or '.join(_usual(model))}."
            )
        if shape not in self.shapes:
            raise ValueError(
                f"objective={name} needs records of the kind {' or '.join(self.shapes)}, and those of data are of the kind {shape}."
                f" Choose other data, objective={' or '.join(_trains(shape))}, or set data.record."
            )
        if data.packing not in (None, *self.packings):
            raise ValueError(
                f"objective={name} packs by {' or '.join(self.packings)}, and data.packing={data.packing}. Choose one of them."
            )
        if (self.needs_masked_documents or data.packing == "fit") and not data.mask_documents:
            name += "" if self.needs_masked_documents else " with data.packing=fit"
            raise ValueError(f"objective={name} takes each document on its own, and data.mask_documents=false. Set it to true.")


class LikelihoodConfig(ObjectiveConfig):
    """Objectives whose loss is the cross-entropy of labels."""

    answers: ClassVar[bool] = False
    """Whether labels are answers, of which loss and accuracy are told."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Part of the target mass spread evenly over the vocabulary (Szegedy et al. 2015, arXiv:1512.00567)."""
    z_loss: float = Field(0.0, ge=0)
    """Factor on the mean of log(Z)^2, which keeps logits small (Chowdhery et al. 2022, arXiv:2204.02311, section 5)."""
    chunk: int = Field(1024, gt=0)
    """Tokens whose logits exist at once."""

    def measure(self, parent: Callable[[], LM] | None) -> Measure:
        return Answers() if self.answers else Measure()

    def unsliced(self) -> str | None:
        return None


class ScheduledSamplingConfig(LikelihoodConfig):
    """Objectives whose inputs may be the model's own."""

    scheduled_sampling: float = Field(0.0, ge=0, le=1)
    """Part of the decoder's inputs that the model itself draws at the last step, growing evenly from none at the first: scheduled
    sampling (Bengio et al. 2015, arXiv:1506.03099). It costs another forward."""

    def unsliced(self) -> str | None:
        if not self.scheduled_sampling:
            return None
        return "objective.scheduled_sampling takes inputs from the place before, which may be of another rank. Set it to 0"


def widest(n: int, *widths: Ids) -> Ids:
    """n rows, repeated where there are fewer: the widest by each of these measures in turn.  widths: of every row."""
    by_turns = np.stack([np.argsort(-width, kind="stable")[:n] for width in widths], axis=1).ravel()
    return np.resize(np.array(list(dict.fromkeys(by_turns.tolist())), np.int64), n)


class PackedRows(Rows):
    """What rows share that are documents laid by a packing, all of one width."""

    def __init__(self, packing: Packing, tokenizer: Tokenizer, seed: int = 0) -> None:
        self.packing, self.pad, self.seed, self.store = packing, tokenizer.pad, seed, packing.store
        self.n_labels = self.store.n_tokens
        self.bytes_per_label = self.store.n_bytes / self.n_labels

    def __len__(self) -> int:
        return len(self.packing)

    def describe(self) -> str:
        return self.packing.describe()


class PartedRows(Rows):
    """What rows share that are records of several parts, some of them learned."""

    def __init__(self, store: TokenStore, tokenizer: Tokenizer, seq_len: int) -> None:
        self._store, self.pad, self._seq_len = store, tokenizer.pad, seq_len
        sizes = np.diff(store.parts[:, 0], append=store.n_tokens)
        self.n_labels = max(1, int(sizes[store.parts[:, 1] % OTHER == LEARNED].sum()))
        self.bytes_per_label = store.n_bytes / self.n_labels

    def _example(self, begin: int, end: int) -> Example:
        """The tokens begin..end-1."""
        parts = self._store.parts
        low, high = np.searchsorted(parts[:, 0], [begin, end])
        learned = np.repeat(parts[low:high, 1] % OTHER == LEARNED, np.diff(parts[low:high, 0], append=end))
        return Example(self._store.read(begin, end).astype(np.int64), learned)

    def _require_most(self, n_kept: int, what: str, fault: str, remedy: str) -> None:
        n = self._store.n_documents
        if n - n_kept > _MOST_DROPPED * n or not n_kept:
            raise ConfigError(
                f"data.seq_len={self._seq_len}: {n - n_kept:,} of {n:,} {what} of the {self._store.split} split {fault} a row, and at most"
                f" {_MOST_DROPPED:.0%} may be dropped. Raise data.seq_len, or {remedy}."
            )


def usual(model: str, shape: str = "text") -> ObjectiveConfig:
    """Returns what models of this kind are mostly trained for, or else what they can be on such records."""
    kinds = ObjectiveConfig.kinds()
    fitting = [name for name, kind in kinds.items() if model in kind.models and shape in kind.shapes]
    return kinds[next((name for name in [*_usual(shape), *_usual(model), *fitting] if name in fitting), _usual(model)[0])].model_validate(
        {}
    )


def _usual(kind_of: str) -> list[str]:
    return [name for name, kind in ObjectiveConfig.kinds().items() if kind_of in kind.usual_for]


def _trains(shape: str) -> list[str]:
    """The objectives that learn from records of this kind."""
    return [name for name, kind in ObjectiveConfig.kinds().items() if shape in kind.shapes]
