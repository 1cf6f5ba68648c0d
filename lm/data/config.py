"""Base classes of all kinds of `data`: options of the rows' layout, and the interface of a source."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from lm.data.mixture import Mixture
from lm.data.records.base import RecordConfig
from lm.data.sizes import Sizes, Smaller, require_rising
from lm.data.sources.base import Source
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.schema import MOST, Slot, Tree
from lm.storage.remote import require_folder

T = TypeVar("T")


class DataConfig(Slot, group="data"):
    """What every source shares."""

    seq_len: int = Field(256, gt=1, le=MOST)
    """Tokens in a row."""
    global_batch: int = Field(8, gt=0, le=MOST)
    """Rows per optimizer step over all ranks; does not depend on the machine."""
    ramp: list[Smaller] = []
    """Smaller batches for the first steps, such as [{until_step:1000,global_batch:2}]. []: all steps have global_batch rows."""
    train_rows: int | None = Field(None, gt=0)
    """Rows that training reads: those that a run without this reads first, then the same again in other orders. null: all."""
    val_rows: int | None = Field(None, gt=0)
    """Rows in a validation; always the same ones, spread evenly. null: all."""
    test_frac: float = Field(0.0, ge=0, lt=1)
    """Part of the held-out text that no validation reads: a training is tested on val_rows rows of it once, behind its last step."""
    packing: Literal["split", "fit", "none"] | None = None
    """split: one stream of documents, cut every seq_len tokens; fit: whole documents side by side, none cut that fits a row; none: one
    a row, padded. null: split for texts, fit for chats, none for pairs and preferences."""
    max_contamination: float = Field(0.5, ge=0, le=1)
    """Part of the validation documents that may be in training too, token for token; more is an error."""
    mask_documents: bool = True
    """Tokens of one packed document do not see another."""
    cache_dir: str = "~/.cache/lm"
    """Where token shards and trained tokenizers are kept."""
    remote: str | None = None
    """URL of a folder, such as s3://bucket/lm, where they are kept for other machines too. null: none."""
    verify: Literal["sample", "full"] = "sample"
    """What of the cached tokens is compared with checksums at each start. sample: of each shard the first block, the last and six that the
    seed picks; full: all, which reads every byte."""
    workers: int = Field(0, ge=0, le=1024)
    """Loader processes. 0: in the training process."""

    @field_validator("remote")
    @classmethod
    def _is_a_folder(cls, remote: str | None) -> str | None:
        if remote is not None:
            require_folder(remote)
        return remote

    @model_validator(mode="after")
    def _batches_grow(self) -> Self:
        require_rising("ramp", [phase.until_step for phase in self.ramp])
        rows = [*(phase.global_batch for phase in self.ramp), self.global_batch]
        if rows != sorted(set(rows)):
            told = ", ".join(map(str, rows[:-1]))
            raise ValueError(f"ramp: global_batch is {told}, and must rise, up to the {rows[-1]} rows behind it. Change one.")
        return self

    @property
    def sizes(self) -> Sizes:
        """Returns how many rows each step reads."""
        return Sizes(self.global_batch, tuple((phase.until_step, phase.global_batch) for phase in self.ramp))

    def phases_end(self) -> int:
        """Returns the step at which the last phase of the data has ended; 0 where there is none."""
        return max((phase.until_step for phase in self.ramp), default=0)

    @abstractmethod
    def parts(self) -> dict[str, "SourceConfig"]:
        """Returns the sources by name: '' where there is only one."""

    @property
    def records(self) -> RecordConfig | None:
        """The kind of record, which decides the possible objectives; None: each record is a plain text."""
        return None

    @property
    def shape(self) -> str:
        """The kind of its records."""
        return "text" if self.records is None else self.records.kind

    def chat_template(self, tokenizer: Tokenizer) -> str | None:
        """Returns the source text of the chat template; templates that sources name go before the others' defaults. None where the data has
        no chats. Raises ConfigError where several templates are left."""
        chats = [each for cfg in self.parts().values() if (each := cfg.records) is not None and each.chat_template(tokenizer) is not None]
        named = [each for each in chats if each.named_template() is not None]
        found = {each.chat_template(tokenizer) for each in named or chats}
        if len(found) > 1:
            raise ConfigError("data.sources: their chats have different templates, and a model has one. Give all one data.record.template.")
        return next(iter(found), None)

    def prompts(self) -> dict[str, str] | None:
        """Returns what stands before queries and documents, as the records of all sources say; {} where they differ, None where none says
        anything."""
        found = [{} if cfg.records is None else cfg.records.prompts() for cfg in self.parts().values()]
        agreed = found[0] if all(each == found[0] for each in found) else {}
        return agreed if any(found) else None

    def trained(self) -> set[str]:
        """Returns the names of the sources that are trained on, not only validated."""
        return set(self.parts())

    def judged(self, found: Mapping[str, T]) -> dict[str, T]:
        """Returns what is found of the sources that are trained on, by which a training is judged; of all where these have nothing."""
        return {name: each for name, each in found.items() if name in self.trained()} or dict(found)

    def mixture(self, n_rows: Mapping[str, int], n_tokens: Mapping[str, int], seed: int, updates: int) -> Mixture | None:
        """Returns the order in which the sources' rows are read; None: there is only one source.  n_rows, n_tokens: by source; updates:
        steps in a row that read the same rows."""
        return None


class SourceConfig(DataConfig):
    """One source of documents. A kind of one's own has a `kind`, its options, and `open`."""

    @abstractmethod
    def open(self, cache: Path) -> Source:
        """Returns the source, which reads the documents.  cache: a folder where it may keep files, such as hashes."""

    def identity(self) -> Tree:
        """Returns what decides the documents besides the content of files: the options of this kind of source alone."""
        return {key: value for key, value in self.tree().items() if key not in DataConfig.model_fields}

    def parts(self) -> dict[str, "SourceConfig"]:
        return {"": self}
