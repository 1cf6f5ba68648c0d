"""What each document of held-out text contributes to a loss, so that one can say what another sample of text would have changed."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from lm.data.order import Ids
from lm.data.rows.base import Rows
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.batch import IGNORED
from lm.schema import Config

FEW = 20
"""Number of documents below which their spread says little, so that each row is taken for one."""


Sum = Annotated[float, Field(ge=0)]


class DocumentSums(Config):
    """Sums over the labels of each document, or of each row where rows do not tell their documents apart or hold few of them."""

    unit: Literal["documents", "rows"]
    sums: dict[str, tuple[float, Sum, Sum]]
    """By the number of the document in its split, or of the row: nats, tokens, and bytes of text, estimated where the tokenizer is not
    byte-level."""


class Documents:
    """The sums of an evaluation of these rows, filled while it runs."""

    def __init__(self, rows: Rows, ids: Ids, tokenizer: Tokenizer, micro_batch: int) -> None:
        """ids: of the rows of all processes that evaluate together."""
        told = [rows.documents(ids[at : at + micro_batch]) for at in range(0, len(ids), micro_batch)]
        known = np.unique(np.concatenate([np.unique(part) for part in told if part is not None] or [np.empty(0, np.int64)]))
        self._by_row = len(known) < FEW
        self._known, self._rows, self._sizes = np.sort(ids) if self._by_row else known, rows, rows.label_bytes(tokenizer)
        self._sums = np.zeros((3, len(self._known)))

    def add(self, ids: Ids, labels: Tensor, guesses: Tensor) -> None:
        """Adds the rows `ids`.  labels: (b, s); guesses: (n, 3), as `guesses` of lm.losses.measure reads them of the n labels."""
        wanted = labels.cpu().numpy()
        of = ids[:, None] if self._by_row else self._rows.documents(ids)
        place = np.searchsorted(self._known, np.broadcast_to(np.asarray(of), wanted.shape)[wanted != IGNORED])
        nats = guesses[:, 0].cpu().double().numpy()
        n_bytes = np.full(len(nats), self._rows.bytes_per_label) if self._sizes is None else self._sizes[wanted[wanted != IGNORED]]
        self._sums += [np.bincount(place, each, len(self._known)) for each in (nats, np.ones_like(nats), n_bytes)]

    def flat(self) -> list[float]:
        """Returns the sums as numbers that processes can add up."""
        return list(self._sums.ravel().tolist())

    def found(self, flat: Sequence[float]) -> DocumentSums:
        """Returns the sums of each document.  flat: what `flat` returned, added up over all processes."""
        columns = zip(self._known.tolist(), np.reshape(flat, self._sums.shape).T.tolist(), strict=True)
        sums = {str(number): (nats, n, size) for number, (nats, n, size) in columns if n}
        return DocumentSums(unit="rows" if self._by_row else "documents", sums=sums)
