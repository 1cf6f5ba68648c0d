"""Arithmetic problems, each a function of the seed and its number: an embedded corpus of questions with one right answer."""

from collections.abc import Iterator
from operator import add, mul, sub
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lm.data.config import SourceConfig
from lm.data.order import permuted
from lm.data.records.base import RecordConfig
from lm.data.records.chat import ChatRecord
from lm.data.sources.base import Document, Source, document, turns_document

_OPERATIONS = {"+": add, "-": sub, "*": mul}
_BLOCK = 1 << 12


class ArithmeticConfig(SourceConfig):
    """Sums such as 12+34, all different, with their results: an embedded corpus of questions and answers."""

    kind: Literal["arithmetic"] = "arithmetic"
    digits: int = Field(2, gt=0, le=6)
    """Most digits of a number in a question."""
    operations: list[Literal["+", "-", "*"]] = Field(["+"], min_length=1)
    """What is done with two numbers."""
    problems: int = Field(10_000, gt=0)
    """How many questions there are in all."""
    problem_seed: int = Field(0, ge=0)
    """Which of all questions those are, and in which order."""
    val_frac: float = Field(0.1, gt=0, lt=1)
    """Part of the questions held out for validation; none of them is in training."""
    record: RecordConfig | None = ChatRecord(user=["question"], assistant="answer")
    """Of the fields question and answer: a chat or a pair. null: a text, 12+34=46."""

    @property
    def records(self) -> RecordConfig | None:
        return self.record

    @property
    def different(self) -> int:
        """Returns the number of possible different questions."""
        return len(self.operations) * 10 ** (2 * self.digits)

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if len(set(self.operations)) < len(self.operations):
            raise ValueError(f"operations={self.operations} names one twice. Name each once.")
        if self.problems > self.different:
            raise ValueError(f"problems={self.problems} are more than the {self.different} that differ. Lower them, or raise digits.")
        return self

    def open(self, cache: Path) -> Source:
        return ArithmeticSource(self)


class ArithmeticSource(Source):
    """One record per question, held out by the hash of its text."""

    def __init__(self, cfg: ArithmeticConfig) -> None:
        super().__init__(cfg.identity())
        self._cfg = cfg

    def documents(self) -> Iterator[Document]:
        cfg = self._cfg
        for start in range(0, cfg.problems, _BLOCK):
            chosen = permuted(np.arange(start, min(start + _BLOCK, cfg.problems)), cfg.different, cfg.problem_seed)
            for question, answer in map(self._problem, chosen.tolist()):
                if cfg.record is None:
                    found = document([f"{question}={answer}"], cfg.val_frac)
                else:
                    values, where = {"question": question, "answer": answer}, f"data=arithmetic: {question}"
                    found = turns_document(cfg.record.recognised(values, where)[0].turns(values, where), cfg.val_frac)
                assert found is not None
                yield found

    def _problem(self, number: int) -> tuple[str, str]:
        """Returns question and answer of the problem with this number."""
        number, a = divmod(number, 10**self._cfg.digits)
        number, b = divmod(number, 10**self._cfg.digits)
        sign = self._cfg.operations[number]
        return f"{a}{sign}{b}", str(_OPERATIONS[sign](a, b))
