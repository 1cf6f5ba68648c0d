"""What the rows of every objective offer."""

from typing import Protocol

from lm.data.order import Ids
from lm.nn.batch import Batch


class Rows(Protocol):
    """Rows by id. What is random in them is a function of (seed, draw, row id, column): draw is the step, and 0 in a validation."""

    bytes_per_label: float  # of text, on average in this split: for tokenizers whose tokens are not bytes

    def __len__(self) -> int:
        """How many."""

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        """These rows in this order."""

    def describe(self) -> str:
        """Lines on what was cut or left empty; '' where there is nothing to say."""
