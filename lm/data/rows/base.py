"""The interfaces of objectives' configs and of rows."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from lm.data.config import DataConfig
from lm.data.layout.best_fit import BestFit
from lm.data.layout.windows import Packing, Windows
from lm.data.order import Ids, rows_at, widest
from lm.data.store.shards import TokenStore
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.losses.measure import Answers, Measure, Start
from lm.nn.batch import AskedAs, Batch
from lm.nn.head import HeadConfig
from lm.nn.model_config import ModelConfig, ModelKind
from lm.schema import Slot, Tree


class Rows(ABC):
    """Rows by id. Their randomness is a function of (seed, draw, row id, column); draw is the step, and 0 in a validation."""

    n_labels: int  # of this split
    uneven: ClassVar[bool] = False  # whether one may become more rows of a batch than another
    updates: int = 1  # steps in a row that learn from the same rows
    bytes_per_label: float = 0.0  # mean bytes of text per label in this split, for tokenizers whose tokens are not bytes; 0: no text

    def label_bytes(self, tokenizer: Tokenizer) -> NDArray[np.int32] | None:
        """Returns (v,) how many bytes of text each label stands for; None where only their mean is known, `bytes_per_label`."""
        return tokenizer.token_bytes()

    def label_names(self) -> Sequence[str] | None:
        """Returns the names of labels that are no tokens; None of tokens."""
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """Returns a batch of these rows, in this order."""

    def widths(self, ids: Ids) -> Sequence[Ids]:
        """Returns what decides how wide a batch of these rows is, each (n,): the tokens of each, or those of sources and of targets. None
        here, where all rows have one width."""
        return ()

    def widest(self, n: int) -> Ids:
        """Returns ids of n rows, repeated where there are fewer, that make the widest possible batch."""
        every = np.arange(len(self), dtype=np.int64)
        return widest(n, *(self.widths(every) or [np.zeros_like(every)]))

    def by_width(self, ids: Ids) -> Ids:
        """Returns these rows, the widest first, so that those of like width share a batch, which is as wide as its widest row."""
        widths = self.widths(ids)
        return ids[np.argsort(-sum(widths[1:], widths[0]), kind="stable")] if widths else ids

    def documents(self, ids: Ids) -> Ids | None:
        """Returns (b, s): the number of each label's document in the split; None where it is unknown and each row counts as a document."""
        return None

    def describe(self) -> str:
        """Returns lines on text that was cut or places left empty; '' where there is nothing to say."""
        return ""

    def remark(self, row: int) -> str:
        """Returns what is known of a row that its tokens do not show; '' where there is nothing."""
        return ""

    def sources(self) -> Mapping[str, "Rows"]:
        """Returns the rows of each source of a mixture by its name; {} of other data."""
        return {}

    def at(self, seed: int, places: range, first: int | None = None) -> Ids:
        """Returns (n,) the ids of the rows at n places of a run.  first: only so many rows are read, over and over; None: all."""
        return rows_at(seed, places, len(self), first)

    def consumed(self, n: int, row_tokens: int) -> dict[str, float]:
        """Returns metrics of a run's first n rows, of so many tokens each: tokens and epochs of each source of a mixture; else {}."""
        return {}


@dataclass(frozen=True)
class Material:
    """Everything from which an objective makes the rows of one split.  packed: `split`, `fit` or `none`.  start: start token of an
    encoder-decoder's decoder; None: the model is none.  model: None: any that the objective trains.  short: a split that does not fill a
    row is one row, as to be evaluated on; else it is refused.
    """

    store: TokenStore
    tokenizer: Tokenizer
    data: DataConfig
    packed: str
    start: int | None = None
    model: ModelConfig | None = None
    seed: int = 0
    short: bool = False

    def packing(self, ahead: int) -> Packing:
        """Returns how documents are laid into rows.  ahead: 1 where a last token is only a label and takes no place; else 0."""
        if self.packed == "fit":
            return BestFit(self.store, self.data.seq_len, ahead)
        return Windows(self.store, self.data.seq_len, self.data.mask_documents, ahead, self.short)


class ObjectiveConfig(Slot, group="objective"):
    """What every objective shares."""

    models: ClassVar[tuple[ModelKind, ...]] = ("decoder",)
    asked_as: ClassVar[AskedAs] = "text"
    shapes: ClassVar[tuple[str, ...]] = ("text",)
    takes_texts: ClassVar[bool] = False
    """Whether a mixture of its records may have sources of plain texts."""
    packings: ClassVar[tuple[str, ...]] = ("split",)
    """Those that it can be given, the usual one first."""
    needs_masked_documents: ClassVar[bool] = False
    needs_parent: ClassVar[bool] = False
    """Whether the loss compares with the model that training starts from."""
    trains_mtp: ClassVar[bool] = True
    """Whether its loss is of the further tokens of model.mtp too; else these blocks stay as they are."""
    trains_head: ClassVar[bool] = True
    """Whether its loss is of what the head tells; else a head with a matrix of its own stays as it is."""
    reads_model: ClassVar[bool] = False
    """Whether its rows depend on the model, in whatever way it is built."""
    own_answers: ClassVar[bool] = False
    """Whether it learns from what the model itself has drawn."""
    usual_for: ClassVar[tuple[str, ...]] = ()
    """Models, and records that are no texts, that mostly serve this."""

    def measure(self, start: Start | None) -> Measure:
        """Returns how a validation measures a model.  start: None: the model that training started from is not known."""
        return Measure()

    def updates_of_rows(self) -> int:
        """Returns how many steps in a row learn from the same rows."""
        return 1

    def parts_of_rows(self) -> int:
        """Returns how many of these share the rows, of which each learns from a part."""
        return 1

    def headed(self, model: ModelConfig) -> ModelConfig:
        """Returns the model with the head that this objective trains. Raises ValueError where it cannot train the one that it has."""
        if model.head.labels is not None:
            new = "model.head.labels=null" + " model.head.several=false" * model.head.several
            rule = f"objective={self.kind} predicts tokens, and the model {model.head.does()} (model.head.labels={model.head.labels})"
            raise ValueError(f"{rule}. Set {new} for a new head, or another objective.")
        if model.head.pooling != "token":
            rule = f"objective={self.kind} predicts tokens, and model.head.pooling={model.head.pooling} is of labels"
            raise ValueError(f"{rule}. Set model.head.pooling=token.")
        return model

    @property
    def texts(self) -> int:
        """How many texts of up to data.seq_len tokens a row has, each a row of the model's batch."""
        return 1

    def held(self, rows: int) -> int:
        """Returns of how many texts a micro-batch of so many rows keeps the activations."""
        return rows * self.texts

    @property
    def reads_again(self) -> bool:
        """Whether the backward runs forwards of the model again."""
        return False

    def judged(self, found: Tree) -> float:
        """Returns of a validation's figures what is less of a better model, for checkpoint.best and trainer.early_stop."""
        return float(found[f"val_{self.measure(None).learned}"])

    def decides(self, figure: str) -> object:
        """Returns the options on which a figure of its measure depends, so that those of two configs compare only where these are equal."""
        return self if figure == self.measure(None).learned != "loss" else None

    def runs_parent(self) -> bool:
        """Whether each step runs the model that training started from."""
        return self.needs_parent

    def learns_from(self) -> tuple[str, str] | None:
        """Returns the option of a further model's folder, a teacher or a reward model, and the folder; None where there is none."""
        return None

    def why_not_from(self, its: HeadConfig, own: HeadConfig) -> str | None:
        """Returns why nothing can be learned from it by its head; None where it can."""
        same = its.labelling() == own.labelling()
        return None if same else f"it tells other things apart than the model (model.head.labels={its.labels})"

    def why_not_in_step(self) -> str | None:
        """Returns why ranks call the model unequally often; None where they do not."""
        return None

    def why_not_context_parallel(self) -> str | None:
        """Returns why ranks cannot share a row in slices, with the remedy; None where they can, as the loss is a sum over tokens."""
        return f"objective={self.kind} needs whole rows in one rank. Set it to 1"

    @abstractmethod
    def rows(self, of: Material) -> Rows:
        """Returns this objective's rows of one split. Raises ConfigError where there are none, or a special token is missing."""

    def specials(self) -> tuple[str, ...]:
        """Returns the special tokens that a tokenizer made for this objective needs beside bos, eos and pad."""
        return ()

    def require_fit(self, model: str, data: DataConfig) -> None:
        """Raises ValueError where this objective cannot train this kind of model, or not on this data."""
        name, shape = self.kind, data.shape
        if model not in self.models:
            what = f"objective={name} trains model.kind={' or '.join(self.models)}, but model.kind is {model}"
            raise ValueError(f"{what}. Choose another model, or {' or '.join(_others(model, shape))}.")
        if shape not in self.shapes:
            others = f", objective={' or '.join(able)}, or" if (able := _trains(model, shape)) else " or"
            raise ValueError(
                f"objective={name} needs records of the kind {' or '.join(self.shapes)}, and those of data are of the kind {shape}."
                f" Choose other data{others} set data.record."
            )
        if shape != "text" and not self.takes_texts and (texts := [key for key, part in data.parts().items() if part.shape == "text"]):
            raise ValueError(f"objective={name} learns from records, and data.sources {', '.join(texts)} are plain texts. Leave them out.")
        if data.packing not in (None, *self.packings):
            raise ValueError(f"objective={name} packs by {' or '.join(self.packings)}, and data.packing={data.packing}. Choose one.")
        if (self.needs_masked_documents or data.packing == "fit") and not data.mask_documents:
            name += "" if self.needs_masked_documents else " with data.packing=fit"
            raise ValueError(f"objective={name} takes each document on its own, and data.mask_documents=false. Set it to true.")


class TaughtConfig(ObjectiveConfig):
    """Objectives that can learn what another model, a teacher, says of each token."""

    chunk: int = Field(1024, gt=0)
    """Tokens whose logits exist at once."""
    teacher: str | None = None
    """Model or run folder, with all tokens of the run, whose probabilities are learned, too (Hinton et al. 2015, arXiv:1503.02531)."""
    teacher_temperature: float = Field(1.0, gt=0)
    """T, by which both models' logits are divided in that part, which is multiplied by T^2: above 1 it tells more of unlikely tokens."""
    teacher_beta: float = Field(0.0, ge=0, le=1)
    """Which divergence from the teacher. 0: KL(teacher || model); 1: KL(model || teacher), reverse; between: the generalized Jensen-Shannon
    divergence (Agarwal et al. 2023, arXiv:2306.13649, equation 1)."""

    def learns_from(self) -> tuple[str, str] | None:
        return None if self.teacher is None else ("objective.teacher", self.teacher)


class LikelihoodConfig(TaughtConfig):
    """Objectives whose loss is the cross-entropy of labels."""

    answers: ClassVar[bool] = False
    """Whether labels are answers, of which loss and accuracy are told."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Part of the target mass spread evenly over the vocabulary (Szegedy et al. 2015, arXiv:1512.00567)."""
    z_loss: float = Field(0.0, ge=0)
    """Factor on the mean of log(Z)^2, which keeps logits small (Chowdhery et al. 2022, arXiv:2204.02311, section 5)."""
    teacher_weight: float = Field(0.5, gt=0, le=1)
    """Part of the loss that is the divergence from the teacher; the rest is the labels'. 1: the teacher alone is learned from."""

    @model_validator(mode="after")
    def _weighs_a_teacher(self) -> Self:
        given = {"teacher_weight": self.teacher_weight, "teacher_temperature": self.teacher_temperature, "teacher_beta": self.teacher_beta}
        for key, value in given.items():
            if self.teacher is None and value != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect without teacher. Set objective.teacher, or drop it.")
        if self.teacher is not None and self.teacher_weight == 1 and self.label_smoothing:
            raise ValueError("label_smoothing has no effect beside teacher_weight=1, which leaves labels out. Drop one of them.")
        return self

    def measure(self, start: Start | None) -> Measure:
        return Answers() if self.answers else Measure()

    def why_not_context_parallel(self) -> str | None:
        return None if self.teacher is None else "objective.teacher needs whole rows in one rank. Set it to 1"


def usual(model: str, shape: str = "text") -> ObjectiveConfig:
    """Returns the usual objective for this kind of model and of records, or else any that can train the model on such records."""
    return ObjectiveConfig.kinds()[[*_trains(model, shape), _usual(model)[0]][0]].model_validate({})


def _usual(kind_of: str) -> list[str]:
    return [name for name, kind in ObjectiveConfig.kinds().items() if kind_of in kind.usual_for]


def _trains(model: str, shape: str) -> list[str]:
    """Returns the names of the objectives that can train this kind of model on records of this kind, the usual ones first."""
    able = [name for name, kind in ObjectiveConfig.kinds().items() if model in kind.models and shape in kind.shapes]
    order = [*_usual(shape), *_usual(model), *able]
    return sorted(able, key=order.index)


def _others(model: str, shape: str) -> list[str]:
    """Returns what else trains this kind of model: what is usual for its records, or with others."""
    if able := _trains(model, shape):
        return [f"objective={name}" for name in able if name in (*_usual(shape), *_usual(model))] or [f"objective={able[0]}"]
    kinds = ObjectiveConfig.kinds()
    return [f"objective={name} and records of the kind {' or '.join(kinds[name].shapes)}" for name in _usual(model)]
