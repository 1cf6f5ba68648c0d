"""`lm.classify`: which kind a text, or a pair of texts, is of."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lm.data.rows.reading import Read, Reading, batch_of
from lm.data.sources.base import Turn
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.answering import turns_of
from lm.generation.decode import decoding
from lm.generation.load import expect_loaded
from lm.generation.text import ids_of
from lm.generation.whole import Whole, numbered, of_text
from lm.nn.context import Context
from lm.nn.head import Head, HeadConfig
from lm.nn.transformer import LM
from lm.ops.defaults import device_unset
from lm.schema import Tree

PREDICTED = "predicted"  # the field that is added to each line
Given = tuple[str, ...] | list[Turn]  # a text, or two, or a chat


@device_unset()
def classify(model: LM, tokenizer: Tokenizer, texts: Sequence[str | tuple[str, ...] | Sequence[Tree]]) -> list[dict[str, float]]:
    """Returns of each text, or pair of texts, the probability of each label, by its name, from a model that objective=classify or
    objective=multi_label has trained; from a regression or a reward model the number that it tells.

    A list of messages is a chat, which the model reads as its chat template writes it. The end of a text that is longer than the model's
    context is left out; of a pair the longer one loses its end first. Raises ConfigError for a model that is no classifier, and for a chat
    that is too long.
    """
    expect_loaded(model, tokenizer)
    given = [_given(text, f"texts: number {number:,}") for number, text in enumerate([] if isinstance(texts, str) else texts, 1)]
    if isinstance(texts, str) or not all(given):
        raise ConfigError(f"texts: {texts!r:.80} is no list of texts or pairs. Give one, such as ['a text'] or [('a text', 'another')].")
    return Telling(model, tokenizer, given).all()


def _given(text: object, where: str) -> Given:
    """Returns a text, a pair or a chat as `Telling` takes it; () for what is none of these."""
    parts = (text,) if isinstance(text, str) else tuple(text) if isinstance(text, Sequence) else ()
    if parts and all(isinstance(part, dict) for part in parts):
        return turns_of({"messages": [*parts]}, where)
    return parts if len(parts) in (1, 2) and all(isinstance(part, str) for part in parts) else ()


def predicted(chances: dict[str, float], head: HeadConfig) -> Tree:
    """Returns the likeliest label, or all that are likelier right than not, where several may be, and all probabilities; of a head that
    tells a number that, by its name."""
    rounded = {name: round(chance, 6) for name, chance in chances.items()}
    if head.tells_number():
        return rounded
    if head.several:
        return {"labels": [name for name, chance in chances.items() if chance > 0.5], "probabilities": rounded}
    return {"label": max(chances, key=chances.__getitem__), "probabilities": rounded}


class Telling(Whole[dict[str, float]]):
    """Texts, pairs of them, or chats, for a classifier to tell apart: of each the probability of each label. Raises ConfigError for a model
    that is none, and for chats that are too long or have no template."""

    def __init__(self, model: LM, tokenizer: Tokenizer, given: Sequence[Given]) -> None:
        if model.cfg.head.labels is None:
            rule = "the model predicts tokens, and tells neither labels nor a number of a text"
            raise ConfigError(f"classify: {rule}. Use one that objective=classify, multi_label, regression or reward has trained.")
        self._model, self._labels = model, model.cfg.head.labels
        self._reading, self._tokenizer = Reading(model.cfg, tokenizer, model.max_seq_len), tokenizer
        super().__init__([self._of(each, numbered(number, len(given))) for number, each in enumerate(given, 1)])

    def found(self, texts: list[Read]) -> list[dict[str, float]]:
        with decoding(self._model):
            return [dict(zip(self._labels, of, strict=True)) for of in _chances(self._model, self._reading, texts)]

    def added(self, found: dict[str, float]) -> Tree:
        return {PREDICTED: predicted(found, self._model.cfg.head)}

    def _of(self, given: Given, which: str) -> Read:
        with of_text(which):
            return self._chat(given, which) if isinstance(given, list) else self._reading.text(*given)

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
