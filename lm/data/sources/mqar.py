"""Multi-query associative recall: pairs of a key and a value, then keys whose values are to be recalled, all in one row."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import ascii_letters, digits, punctuation
from typing import Literal, Self

from pydantic import Field, model_validator

from lm.data.config import SourceConfig
from lm.data.records.base import GIVEN, LEARNED, Passage, RecordConfig, Values
from lm.data.sources.base import Document, Source, Turn, turns_document
from lm.data.tokenizer.tokenizer import Tokenizer

KEYS, VALUES = ascii_letters + digits, punctuation


class RecallRecord(RecordConfig):
    """What is given and what is to be told, by turns and with nothing between them."""

    kind: Literal["recall"] = "recall"

    def turns(self, values: Values, where: str) -> list[Turn]:
        return [Turn(role, text) for role, text in values["turns"]]

    def passages(self, documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Passage]:
        for found in documents:
            last = len(found.turns) - 1
            for i, (role, text, _) in enumerate(found.turns):
                told = role == "told"
                head = tokenizer.prefix if i == 0 else []
                yield Passage(found.split, text, head, [], i == 0, i == last, LEARNED if told else GIVEN, counted=told)


class MQARConfig(SourceConfig):
    """Associative recall of several keys in a row (Arora et al. 2023, arXiv:2312.04927): a measure of what a mixer can hold.

    A row is up to n_pairs different keys, each with its value, and then n_queries keys drawn from them, each followed by its value. On
    these values alone there is a loss. At most 2 n_pairs + 2 n_queries bytes stand behind bos. The paper scatters its queries among
    filler; here there is none.
    """

    kind: Literal["mqar"] = "mqar"
    n_pairs: int = Field(16, gt=0, le=len(KEYS))
    """Keys of a row, at most."""
    fewest_pairs: int | None = Field(None, gt=0)
    """Keys of a row, at least: any number between the two is as likely, and short rows are learned first. null: n_pairs."""
    n_queries: int = Field(16, gt=0)
    """Keys that are asked for, any of the row's, some twice: of keys that come once each, those left would tell the values."""
    n_keys: int = Field(len(KEYS), gt=0, le=len(KEYS))
    """Keys that there are: letters and digits."""
    n_values: int = Field(len(VALUES), gt=1, le=len(VALUES))
    """Values that there are: punctuation marks."""
    n_records: int = Field(10_000, gt=0)
    """Rows that are generated, row i a function of record_seed and i."""
    record_seed: int = Field(0, ge=0)
    """Which rows those are."""
    val_frac: float = Field(0.05, gt=0, lt=1)
    """Part of the rows held out, by the hash of their text, so that none of them is in training."""

    @model_validator(mode="after")
    def _keys_suffice(self) -> Self:
        if not (self.fewest_pairs or 1) <= self.n_pairs <= self.n_keys:
            raise ValueError(
                f"n_pairs={self.n_pairs} must be between fewest_pairs={self.fewest_pairs} and n_keys={self.n_keys}. Change one of them."
            )
        return self

    @property
    def records(self) -> RecordConfig | None:
        return RecallRecord()

    def open(self, cache: Path) -> Source:
        return MQARSource(self)


class MQARSource(Source):
    """One record a row."""

    def __init__(self, cfg: MQARConfig) -> None:
        super().__init__(cfg.identity())
        self._cfg = cfg

    def documents(self) -> Iterator[Document]:
        for i in range(self._cfg.n_records):
            found = turns_document(self._row(i), self._cfg.val_frac)
            assert found is not None
            yield found

    def _row(self, i: int) -> list[Turn]:
        cfg, source = self._cfg, random.Random(f"{self._cfg.record_seed} {i}")
        n = cfg.n_pairs if cfg.fewest_pairs is None else source.randint(cfg.fewest_pairs, cfg.n_pairs)
        pairs = [(key, source.choice(VALUES[: cfg.n_values])) for key in source.sample(KEYS[: cfg.n_keys], n)]
        turns: list[Turn] = []
        for key, value in source.choices(pairs, k=cfg.n_queries):
            turns += [Turn("given", key), Turn("told", value)]
        return [Turn("given", "".join(map("".join, pairs)) + turns[0].text), *turns[1:]]
