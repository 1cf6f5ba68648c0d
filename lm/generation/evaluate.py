"""Loss and bits per byte of a model on rows of tokens."""

import math
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from lm.data.loader import eval_batches
from lm.data.protocol import Rows
from lm.data.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED
from lm.nn.loss import LossSums, causal_reader
from lm.nn.transformer import LM


class Evaluation(TypedDict):
    """`bytes`: of text that the predicted tokens stand for; estimated where the tokenizer is not byte-level."""

    val_loss: float  # nats per predicted token
    val_bits_per_byte: float
    tokens: int
    bytes: int


def evaluate(model: LM, rows: Rows, ids: NDArray[np.int64], tokenizer: Tokenizer, micro_batch: int) -> Evaluation:
    """Of the labels of the rows `ids`. Raises ConfigError where there is none.

    Bits per byte = nats / ln 2 / bytes, so that tokenizers compare.
    """
    device = model.embed.weight.device
    sizes = tokenizer.token_bytes()
    losses: list[torch.Tensor] = []
    tokens = n_bytes = 0
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in eval_batches(rows, ids, micro_batch):
                assert batch.labels is not None
                predicted = batch.labels[batch.labels != IGNORED].numpy()
                tokens += len(predicted)
                n_bytes += int(sizes[predicted].sum()) if sizes is not None else 0
                moved = batch.to(device)
                assert moved.labels is not None
                sums: LossSums = model(moved, loss=causal_reader(moved.labels))
                losses.append(sums.nll)
    finally:
        model.train(was_training)
    if sizes is None and tokens:
        n_bytes = round(rows.bytes_per_label * tokens)
    if not n_bytes:
        raise ConfigError(f"data: {len(ids)} rows have {tokens} tokens and 0 bytes to predict, and at least one is needed. Give more text.")
    nats = torch.stack(losses).double().sum().item()
    return Evaluation(val_loss=nats / tokens, val_bits_per_byte=nats / math.log(2) / n_bytes, tokens=tokens, bytes=n_bytes)
