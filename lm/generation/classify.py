"""`lm.classify`: which kind a text, or a pair of texts, is of."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lm.data.rows.reading import Read, Reading, batch_of
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError, expect
from lm.generation.decode import decoding
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.transformer import LM
from lm.ops.defaults import device_unset

_ROWS, _TOKENS = 32, 1 << 14  # of a batch at the most, so that long texts need no more memory than short ones


@device_unset()
def classify(model: LM, tokenizer: Tokenizer, texts: Sequence[str | tuple[str, ...]]) -> list[dict[str, float]]:
    """Returns of each text, or pair of texts, the probability of each label, by its name, from a model that objective=classify has trained;
    from a reward model the number that it tells.

    The end of a text that is longer than the model's context is left out; of a pair the longer one loses its end first. Raises ConfigError
    for a model that is no classifier.
    """
    expect("model", model, torch.nn.Module, "Give the model and the tokenizer that lm.load returned")
    expect("tokenizer", tokenizer, Tokenizer, "Give the model and the tokenizer that lm.load returned")
    pairs = [(text,) if isinstance(text, str) else tuple(text) for text in ([] if isinstance(texts, str) else texts)]
    if isinstance(texts, str) or not all(len(pair) in (1, 2) and all(isinstance(text, str) for text in pair) for pair in pairs):
        raise ConfigError(f"texts: {texts!r:.80} is no list of texts or pairs. Give one, such as ['a text'] or [('a text', 'another')].")
    if (labels := model.cfg.head.labels) is None:
        raise ConfigError("classify: the model predicts tokens and tells no texts apart. Use one that objective=classify has trained.")
    reading = Reading(model.cfg, tokenizer, model.max_seq_len)
    read = [reading.text(*pair) for pair in pairs]
    lengths = [len(each.ids) for each in read]
    if empty := [number for number, length in enumerate(lengths, 1) if not length]:
        raise ConfigError(f"texts: number {empty[0]:,} of {len(texts):,} has no tokens, and a label is read off at one. Leave it out.")
    found: list[dict[str, float]] = [{} for _ in texts]
    order = sorted(range(len(texts)), key=lambda i: -lengths[i])  # texts of like lengths side by side have little padding
    with decoding(model):
        at = 0
        while at < len(order):
            some = order[at : at + max(1, min(_ROWS, _TOKENS >> (lengths[order[at]] - 1).bit_length()))]  # few numbers: each is compiled
            at += len(some)
            for i, chances in zip(some, _chances(model, reading, [read[i] for i in some]), strict=True):
                found[i] = dict(zip(labels, chances, strict=True))
    return found


def _chances(model: LM, reading: Reading, texts: list[Read]) -> list[list[float]]:
    """Returns the probabilities of all labels, for each text; of a single one the logit, which is a number of its own.

    texts: as `reading` has read them.
    """
    lengths, device = [len(text.ids) for text in texts], model.embed.weight.device
    batch = batch_of([[text] for text in texts], max(lengths), pad=0)
    at = torch.tensor([reading.place(length) for length in lengths], device=device)

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        logits: Tensor = head(hidden[torch.arange(len(texts), device=device), at])
        return logits.float() if logits.shape[-1] == 1 else logits.float().softmax(-1)

    found: list[list[float]] = model(batch.to(device), read=read).tolist()
    return found
