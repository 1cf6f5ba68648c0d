"""What each document of held-out text contributes to a loss, so that one can say what another sample of text would have changed."""

from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from lm.data.order import Ids
from lm.data.rows.base import Rows
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.generation.evaluate import Sharers
from lm.nn.batch import IGNORED
from lm.nn.measure import Measure
from lm.nn.transformer import LM
from lm.schema import Config

FEW = 20
"""Documents, below which their spread says little and rows stand for themselves."""


Sum = Annotated[float, Field(ge=0)]


class DocumentSums(Config):
    """Sums over the labels of each document, or of each row where rows do not tell their documents apart or hold few of them."""

    unit: Literal["documents", "rows"]
    sums: dict[str, tuple[float, Sum, Sum]]
    """By the number of the document in its split, or of the row: nats, tokens, and bytes of text, estimated where the tokenizer is not
    byte-level."""


def document_sums(
    model: LM, rows: Rows, ids: Ids, tokenizer: Tokenizer, micro_batch: int, among: Sharers, measure: Measure
) -> DocumentSums:
    """Of the labels of the rows `ids`, which each of the processes `among` passes all."""
    documents, mine, was_training = _documents(rows, ids, micro_batch), ids[among.rank :: among.world], model.training
    unit: Literal["documents", "rows"] = "rows" if len(documents) < FEW else "documents"
    known = np.sort(ids) if unit == "rows" else documents
    sums = np.zeros((3, len(known)))
    model.eval()
    with torch.inference_mode():
        for at in range(0, len(ids[:: among.world]), micro_batch):
            part = mine[at : at + micro_batch]
            batch = rows.batch(part if len(part) else ids[:1])  # where weights are in slices, all must come to each forward
            nats = measure.nats(model, batch.to(model.embed.weight.device)).double().cpu().numpy()
            if len(part):
                labels = measure.labels(batch).numpy()
                of = part[:, None] if unit == "rows" else rows.documents(part)
                place = np.searchsorted(known, np.broadcast_to(np.asarray(of), labels.shape)[labels != IGNORED])
                n_bytes = _bytes(labels[labels != IGNORED], rows, tokenizer)
                sums += [np.bincount(place, each, len(known)) for each in (nats, np.ones_like(nats), n_bytes)]
    model.train(was_training)
    columns = np.reshape(among.total(*sums.ravel().tolist()), sums.shape).T.tolist()
    found = zip(known.tolist(), columns, strict=True)
    return DocumentSums(unit=unit, sums={str(number): (nats, n, size) for number, (nats, n, size) in found if n})


def _bytes(predicted: Ids, rows: Rows, tokenizer: Tokenizer) -> NDArray[Any]:
    sizes = tokenizer.token_bytes()
    return np.full(len(predicted), rows.bytes_per_label) if sizes is None else sizes[predicted]


def _documents(rows: Rows, ids: Ids, micro_batch: int) -> Ids:
    """Returns all that have a place in these rows, ascending; none where rows do not tell."""
    parts = [rows.documents(ids[at : at + micro_batch]) for at in range(0, len(ids), micro_batch)]
    return np.unique(np.concatenate([np.unique(part) for part in parts if part is not None] or [np.empty(0, np.int64)]))
