"""`lm.classify`: which kind a text is of."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lm.data.layout.examples import places_of, side_by_side
from lm.data.order import Ids
from lm.data.rows.classify import Reading
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError, expect
from lm.generation.decode import decoding
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.transformer import LM
from lm.ops.defaults import device_unset

_ROWS, _TOKENS = 32, 1 << 14  # of a batch at the most, so that long texts need no more memory than short ones


@device_unset()
def classify(model: LM, tokenizer: Tokenizer, texts: Sequence[str]) -> list[dict[str, float]]:
    """Returns of each text the probability of each label, by its name, from a model that was trained by objective=classify; from a reward
    model the number that it tells.

    The end of a text that is longer than the model's context is left out. Raises ConfigError for a model that is no classifier.
    """
    expect("model", model, torch.nn.Module, "Give the model and the tokenizer that lm.load returned")
    expect("tokenizer", tokenizer, Tokenizer, "Give the model and the tokenizer that lm.load returned")
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"texts: {texts!r:.80} is no list of texts. Give one, such as ['a text'].")
    if (labels := model.cfg.head.labels) is None:
        raise ConfigError("classify: the model predicts tokens and tells no texts apart. Use one that objective=classify has trained.")
    reading = Reading(model.cfg, tokenizer, model.max_seq_len)
    ids = [reading.text(text) for text in texts]
    if empty := [number for number, found in enumerate(ids, 1) if not len(found)]:
        raise ConfigError(f"texts: number {empty[0]:,} of {len(texts):,} has no tokens, and a label is read off at one. Leave it out.")
    found: list[dict[str, float]] = [{} for _ in texts]
    order = sorted(range(len(texts)), key=lambda i: -len(ids[i]))  # texts of like lengths side by side have little padding
    with decoding(model):
        at = 0
        while at < len(order):
            some = order[at : at + max(1, min(_ROWS, _TOKENS >> (len(ids[order[at]]) - 1).bit_length()))]  # few numbers: each is compiled
            at += len(some)
            for i, chances in zip(some, _chances(model, reading, [ids[i] for i in some]), strict=True):
                found[i] = dict(zip(labels, chances, strict=True))
    return found


def _chances(model: LM, reading: Reading, texts: list[Ids]) -> list[list[float]]:
    """Returns the probabilities of all labels, for each text; of a single one the logit, which is a number of its own."""
    rows, width, device = [[text] for text in texts], max(map(len, texts)), model.embed.weight.device
    positions, documents = places_of(rows, width)
    batch = Batch(side_by_side(rows, width, 0), positions=positions, documents=documents)
    at = torch.from_numpy(np.array([reading.place(len(text)) for text in texts])).to(device)

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        logits: Tensor = head(hidden[torch.arange(len(texts), device=device), at])
        return logits.float() if logits.shape[-1] == 1 else logits.float().softmax(-1)

    found: list[list[float]] = model(batch.to(device), read=read).tolist()
    return found
