"""`lm.classify`: which kind a text, or a pair of texts, is of."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lm.data.rows.reading import Read, Reading, batch_of
from lm.data.sources.base import Turn
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError, expect
from lm.generation.answering import add_line, digest, gone_on_with, turns_of
from lm.generation.decode import decoding
from lm.generation.text import ids_of
from lm.nn.context import Context
from lm.nn.head import Head, HeadConfig
from lm.nn.transformer import LM
from lm.ops.defaults import device_unset
from lm.schema import Tree

PREDICTED = "predicted"  # the field that is added to each line
Given = tuple[str, ...] | list[Turn]  # a text, or two, or a chat
_ROWS, _TOKENS = 32, 1 << 14  # of a batch at the most, so that long texts need no more memory than short ones


@device_unset()
def classify(model: LM, tokenizer: Tokenizer, texts: Sequence[str | tuple[str, ...] | Sequence[Tree]]) -> list[dict[str, float]]:
    """Returns of each text, or pair of texts, the probability of each label, by its name, from a model that objective=classify or
    objective=multi_label has trained; from a regression or a reward model the number that it tells.

    A list of messages is a chat, which the model reads as its chat template writes it. The end of a text that is longer than the model's
    context is left out; of a pair the longer one loses its end first. Raises ConfigError for a model that is no classifier, and for a chat
    that is too long.
    """
    expect("model", model, torch.nn.Module, "Give the model and the tokenizer that lm.load returned")
    expect("tokenizer", tokenizer, Tokenizer, "Give the model and the tokenizer that lm.load returned")
    given = [_given(text, f"texts: number {number:,}") for number, text in enumerate([] if isinstance(texts, str) else texts, 1)]
    if isinstance(texts, str) or not all(given):
        raise ConfigError(f"texts: {texts!r:.80} is no list of texts or pairs. Give one, such as ['a text'] or [('a text', 'another')].")
    found: list[dict[str, float]] = [{} for _ in given]
    for each in Telling(model, tokenizer, given).batches():
        for i, chances in each:
            found[i] = chances
    return found


def _given(text: object, where: str) -> Given:
    """Returns a text, a pair or a chat as `Telling` takes it; () for what is none of these."""
    parts = (text,) if isinstance(text, str) else tuple(text) if isinstance(text, Sequence) else ()
    if parts and all(isinstance(part, dict) for part in parts):
        return turns_of({"messages": [*parts]}, where)
    return parts if len(parts) in (1, 2) and all(isinstance(part, str) for part in parts) else ()


def classify_file(
    model: LM, tokenizer: Tokenizer, lines: Sequence[Tree], given: Sequence[Given], out: Path, asked: Tree,
    told: Callable[[int], None], anew: bool = False,
) -> int:  # fmt: skip
    """Writes a file with each line and what was `PREDICTED` of its text, pair or chat, and returns of how many this was done here; a start
    that was ended is gone on with, as by `answer_all`, whose arguments have these names.  told: called with how many are done so far."""
    telling = Telling(model, tokenizer, given)
    with gone_on_with(out, asked | {"texts": digest(lines)}, anew) as (file, done):
        so_far = len(done)
        for each in telling.batches(len(done)):
            for i, chances in each:
                add_line(file, i, lines[i] | {PREDICTED: predicted(chances, model.cfg.head)})
            so_far += len(each)
            told(so_far)
    return len(lines) - len(done)


def predicted(chances: dict[str, float], head: HeadConfig) -> Tree:
    """Returns the likeliest label, or all that are likelier right than not, where several may be, and all probabilities; of a head that
    tells a number that, by its name."""
    rounded = {name: round(chance, 6) for name, chance in chances.items()}
    if head.tells_number():
        return rounded
    if head.several:
        return {"labels": [name for name, chance in chances.items() if chance > 0.5], "probabilities": rounded}
    return {"label": max(chances, key=chances.__getitem__), "probabilities": rounded}


class Telling:
    """Texts, pairs of them, or chats, for a classifier to tell apart, the longest first: those of like lengths side by side have little
    padding. Raises ConfigError for a model that is none, a text of no tokens, and chats that are too long or have no template."""

    def __init__(self, model: LM, tokenizer: Tokenizer, given: Sequence[Given]) -> None:
        if model.cfg.head.labels is None:
            rule = "the model predicts tokens, and tells neither labels nor a number of a text"
            raise ConfigError(f"classify: {rule}. Use one that objective=classify, multi_label, regression or reward has trained.")
        self._model, self._labels = model, model.cfg.head.labels
        self._reading, self._tokenizer = Reading(model.cfg, tokenizer, model.max_seq_len), tokenizer
        self._read = [self._of(each, f"number {number:,} of {len(given):,}") for number, each in enumerate(given, 1)]
        self._lengths = [len(each.ids) for each in self._read]
        if empty := [number for number, length in enumerate(self._lengths, 1) if not length]:
            raise ConfigError(f"texts: number {empty[0]:,} of {len(given):,} has no tokens, and a label is read off at one. Leave it out.")
        self._order = sorted(range(len(given)), key=lambda i: -self._lengths[i])

    def _of(self, given: Given, which: str) -> Read:
        try:
            return self._chat(given, which) if isinstance(given, list) else self._reading.text(*given)
        except UnicodeEncodeError as error:
            fault = f"character {error.start} ({error.object[error.start]!r}) is not valid Unicode"
            raise ConfigError(f"texts: {which}: {fault}. Give it as UTF-8.") from None

    @cached_property
    def _template(self) -> ChatTemplate:
        if (source := self._tokenizer.chat_template) is None:
            raise ConfigError("texts: the model's tokenizer has no chat template. Give plain texts, or use a model that has read chats.")
        return ChatTemplate(source, "tokenizer", self._tokenizer)

    def _chat(self, turns: list[Turn], which: str) -> Read:
        ids, most = ids_of(self._tokenizer, self._template.whole(turns)), self._model.max_seq_len
        if len(ids) > most:  # without its end it would be judged where the model has never been asked
            raise ConfigError(
                f"texts: {which} is a chat of {len(ids):,} tokens, and the model reads {most:,}. Shorten it, or leave it out."
            )
        return self._reading.as_it_is(np.array(ids, np.int64))

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
    """Returns what the head answers, for each text.

    texts: as `reading` has read them.
    """
    lengths, device = [len(text.ids) for text in texts], model.embed.weight.device
    batch = batch_of([[text] for text in texts], max(lengths), pad=0)
    at = torch.tensor([reading.place(length) for length in lengths], device=device)

    def read(hidden: Tensor, head: Head, ctx: Context) -> Tensor:
        return model.cfg.head.answer(head(hidden[torch.arange(len(texts), device=device), at]))

    found: list[list[float]] = model(batch.to(device), read=read).tolist()
    return found
