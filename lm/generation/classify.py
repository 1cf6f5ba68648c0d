"""`lm.classify`: which kind a text, or a pair of texts, is of."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lm.data.rows.reading import Read, Reading, batch_of
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError, expect
from lm.generation.answering import add_line, digest, gone_on_with
from lm.generation.decode import decoding
from lm.nn.context import Context
from lm.nn.head import Head
from lm.nn.transformer import LM
from lm.ops.defaults import device_unset
from lm.schema import Tree

PREDICTED = "predicted"  # the field that is added to each line
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
    found: list[dict[str, float]] = [{} for _ in pairs]
    for each in Telling(model, tokenizer, pairs).batches():
        for i, chances in each:
            found[i] = chances
    return found


def classify_file(
    model: LM, tokenizer: Tokenizer, lines: Sequence[Tree], pairs: Sequence[tuple[str, ...]], out: Path, asked: Tree,
    told: Callable[[int], None], anew: bool = False,
) -> int:  # fmt: skip
    """Writes a file with each line and what was `PREDICTED` of its text or pair, and returns of how many this was done here; a start that
    was ended is gone on with, as by `answer_all`, whose arguments have these names.  told: called with how many are done so far."""
    telling = Telling(model, tokenizer, pairs)
    with gone_on_with(out, asked | {"texts": digest(lines)}, anew) as (file, done):
        so_far = len(done)
        for each in telling.batches(len(done)):
            for i, chances in each:
                add_line(file, i, lines[i] | {PREDICTED: predicted(chances)})
            so_far += len(each)
            told(so_far)
    return len(lines) - len(done)


def predicted(chances: dict[str, float]) -> Tree:
    """Returns the likeliest label, and all probabilities; of a reward model its number, by its name."""
    if len(chances) == 1:
        return {name: round(number, 6) for name, number in chances.items()}
    return {"label": max(chances, key=chances.__getitem__), "probabilities": {name: round(chance, 6) for name, chance in chances.items()}}


class Telling:
    """Texts, or pairs of them, for a classifier to tell apart, the longest first: those of like lengths side by side have little padding.
    Raises ConfigError for a model that is none, and for a text of no tokens."""

    def __init__(self, model: LM, tokenizer: Tokenizer, pairs: Sequence[tuple[str, ...]]) -> None:
        if model.cfg.head.labels is None:
            raise ConfigError("classify: the model predicts tokens and tells no texts apart. Use one that objective=classify has trained.")
        self._model, self._labels = model, model.cfg.head.labels
        self._reading = Reading(model.cfg, tokenizer, model.max_seq_len)
        self._read = [self._of(pair, f"number {number:,} of {len(pairs):,}") for number, pair in enumerate(pairs, 1)]
        self._lengths = [len(each.ids) for each in self._read]
        if empty := [number for number, length in enumerate(self._lengths, 1) if not length]:
            raise ConfigError(f"texts: number {empty[0]:,} of {len(pairs):,} has no tokens, and a label is read off at one. Leave it out.")
        self._order = sorted(range(len(pairs)), key=lambda i: -self._lengths[i])

    def _of(self, pair: tuple[str, ...], which: str) -> Read:
        try:
            return self._reading.text(*pair)
        except UnicodeEncodeError as error:
            fault = f"character {error.start} ({error.object[error.start]!r}) is not valid Unicode"
            raise ConfigError(f"texts: {which}: {fault}. Give it as UTF-8.") from None

    def batches(self, done: int = 0) -> Iterator[list[tuple[int, dict[str, float]]]]:
        """Yields the numbers of texts and their labels' probabilities, batch by batch.  done: so many of the first are left out, without
        any mark on the others."""
        end = 0
        while end < len(self._order):
            start, longest = end, self._lengths[self._order[end]]
            end = min(len(self._order), start + max(1, min(_ROWS, _TOKENS >> (longest - 1).bit_length())))  # few numbers: each is compiled
            if end > done:
                some = self._order[start:end]
                with decoding(self._model):
                    chances = _chances(self._model, self._reading, [self._read[i] for i in some])
                each = [(i, dict(zip(self._labels, of, strict=True))) for i, of in zip(some, chances, strict=True)]
                yield each[max(0, done - start) :]


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
