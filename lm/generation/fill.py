"""`lm.fill`: the masks of a text are filled in, a few at a time, by an encoder: of masked language modelling, or of masked diffusion."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from lm.data.rows.reading import Read, Reading, batch_of
from lm.data.tokenizer.source import around
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError, NumericsError
from lm.generation.config import FillConfig
from lm.generation.decode import decoding
from lm.generation.load import expect_loaded
from lm.generation.sampling import HIDDEN, Logprob, drawn, filtered, likeliest, logprobs, row_keys, uniform
from lm.generation.text import ends_of, ids_of
from lm.generation.whole import Whole, numbered, of_text
from lm.nn.context import Context
from lm.nn.head import CHUNK, Head
from lm.nn.transformer import LM
from lm.ops.defaults import device_unset
from lm.schema import Tree, from_tree

FILLED = "filled"  # the field that is added to each line
_PLACES = 1 << 32  # more than any text has: the draw of a place in a forward is number forward * _PLACES + place
_ORDER = 1 << 63  # beyond the numbers of these draws: that of a place's turn in a random order is _ORDER + place


@dataclass(frozen=True)
class Filled:
    """A text without masks. tokens: of each mask, in the order of the text, its token, log p of it when it was filled in, and of the
    likeliest ones; without those behind an end token that were put behind the text."""

    text: str
    tokens: list[Logprob]


@overload
def fill(model: LM, tokenizer: Tokenizer, text: str, **options: Any) -> str: ...
@overload
def fill(model: LM, tokenizer: Tokenizer, text: list[str], **options: Any) -> list[str]: ...
@device_unset()
def fill(model: LM, tokenizer: Tokenizer, text: Any, **options: Any) -> Any:
    """Returns the text with its masks filled in, or each of several texts.  text: with the tokenizer's mask token, such as <|mask|>, where
    something is to be filled in.  options: the fields of FillConfig (max_tokens, at_once, order, temperature, ...).

    Raises ConfigError for a model that is no encoder or a tokenizer without a mask token, for a text without a mask unless max_tokens puts
    some behind it, and for one that is longer than the model's context.
    """
    expect_loaded(model, tokenizer)
    texts: Any = [text] if isinstance(text, str) else text
    if not isinstance(texts, list | tuple) or not all(isinstance(each, str) for each in texts):
        raise ConfigError(f"text: {text!r:.80} is no text, and no list of texts. Give one, such as 'a text'.")
    found = [each.text for each in Filling(model, tokenizer, texts, from_tree(FillConfig, options)).all()]
    return found[0] if isinstance(text, str) else found


class Filling(Whole[Filled]):
    """Texts whose masks are filled in. Raises ConfigError as `fill`."""

    def __init__(self, model: LM, tokenizer: Tokenizer, texts: Sequence[str], cfg: FillConfig) -> None:
        self._mask, self._ends = _mask_of(model, tokenizer), ends_of(tokenizer)
        self._model, self.tokenizer, self._cfg = model, tokenizer, cfg
        self._reading = Reading(model.cfg, tokenizer, model.max_seq_len)
        self._specials = sorted({*tokenizer.special_names, tokenizer.pad, *self._ends})
        super().__init__([self._read_text(text, numbered(number, len(texts))) for number, text in enumerate(texts, 1)])

    def _read_text(self, text: str, which: str) -> Read:
        tokenizer, n = self.tokenizer, self._cfg.max_tokens
        name = tokenizer.special_names[self._mask]
        parts = [part for piece in text.split(name) for part in (self._mask, piece)][1:]
        with of_text(which):
            before, behind = around(tokenizer)
            ids = [*before, *ids_of(tokenizer, parts), *([self._mask] * n or behind)]
        if self._mask not in ids:
            raise ConfigError(f"text: {which} has no mask. Write {name} where something is to be filled in, or set max_tokens.")
        if len(ids) > self._model.max_seq_len:
            rule = f"and the model reads at most {self._model.max_seq_len:,}"
            raise ConfigError(
                f"text: {which} has {len(ids):,} tokens with its masks, {rule}. Shorten it{', or lower max_tokens' * (n > 0)}."
            )
        return self._reading.as_it_is(np.array(ids, np.int64))

    def found(self, texts: list[Read]) -> list[Filled]:
        keys = [row_keys([read.ids.tolist()], self._cfg.seed)[0] for read in texts]  # of the row alone, so that no other changes its draws
        rows = [_Row(key, read.ids.tolist(), self._mask, self._cfg) for key, read in zip(keys, texts, strict=True)]
        forward = 0
        while going := [row for row in rows if row.left]:
            self._step(going, forward)
            forward += 1
        return [self._filled(row) for row in rows]

    def _step(self, rows: "list[_Row]", forward: int) -> None:
        """Fills in some masks of each row, by one forward."""
        width, device = max(len(row.ids) for row in rows), self._model.embed.weight.device
        batch = batch_of([[self._reading.as_it_is(np.array(row.ids))] for row in rows], width, pad=self.tokenizer.pad)
        places = [(i, place) for i, row in enumerate(rows) for place in row.open()]
        at = torch.tensor([i * width + place for i, place in places], device=device)
        behind = torch.tensor([place >= len(rows[i].ids) - self._cfg.max_tokens for i, place in places], device=device)
        drawing = self._cfg.temperature > 0
        chances = [uniform(rows[i].key, forward * _PLACES + place) for i, place in places] if drawing else []

        def read(hidden: Tensor, head: Head, ctx: Context) -> list[Logprob]:
            parts = zip(hidden.flatten(0, 1)[at].split(CHUNK), behind.split(CHUNK), strict=True)
            each = ((head(some), ends, chances[n * CHUNK :][: len(some)]) for n, (some, ends) in enumerate(parts))
            return [one for part in each for one in self._chosen(*part)]

        with decoding(self._model):
            told: list[Logprob] = self._model(batch.to(device), read=read)
        for i, row in enumerate(rows):
            row.take({place: one for (of, place), one in zip(places, told, strict=True) if of == i}, self._ends)

    def _chosen(self, logits: Tensor, behind: Tensor, chances: list[float]) -> list[Logprob]:
        """Returns a token for each place, with log p of it and of the likeliest ones.  logits: (n, v); behind: (n,) bool, whether the place
        is behind the text, which may end there; no other special token is chosen."""
        logits = logits[:, : self.tokenizer.vocab_size].float()
        if not logits.sum().isfinite() and not logits.isfinite().all():
            raise NumericsError("fill: the model's logits hold NaN or infinity, and no token can be chosen. Use another checkpoint.")
        able = logits.index_fill(1, torch.tensor(self._specials, device=logits.device), HIDDEN)
        able[:, self._ends] = logits[:, self._ends].where(behind.unsqueeze(-1), HIDDEN)
        tokens = drawn(filtered(able, self._cfg), chances) if chances else likeliest(able)
        return logprobs(logits, tokens, self._cfg.likeliest)

    def _filled(self, row: "_Row") -> Filled:
        end = row.end(self._ends)
        return Filled(self.tokenizer.decode(row.ids[:end]), [one for place, one in sorted(row.told.items()) if place < end])

    def added(self, found: Filled) -> Tree:
        return {FILLED: asdict(found)}


class _Row:
    """A text whose masks are filled in."""

    def __init__(self, key: bytes, ids: list[int], mask: int, cfg: FillConfig) -> None:
        self.key, self.ids, self._cfg = key, ids, cfg
        self._places = [place for place, token in enumerate(ids) if token == mask]
        self.left = {*self._places}
        self.told: dict[int, Logprob] = {}

    def open(self) -> list[int]:
        """Returns the places that are to be filled in next: what is left of the first block."""
        size = self._cfg.block or len(self._places)
        blocks = (self._places[start : start + size] for start in range(0, len(self._places), size))
        return next(open_ for block in blocks if (open_ := [place for place in block if place in self.left]))

    def take(self, found: dict[int, Logprob], ends: Sequence[int]) -> None:
        """Fills in some of the places for which a token was chosen."""
        for place in sorted(found, key=lambda place: (self._rank(place, found[place]), place))[: self._cfg.at_once]:
            self.ids[place], self.told[place] = found[place].token, found[place]
            self.left.remove(place)
        if min(self.left, default=0) > self.end(ends):
            self.left = set()  # what comes behind the end is no part of the text

    def _rank(self, place: int, found: Logprob) -> float:
        """Returns what places are filled in by, the lowest first."""
        return -found.logprob if self._cfg.order == "sure" else uniform(self.key, _ORDER + place)

    def end(self, ends: Sequence[int]) -> int:
        """Returns the place of the first end token among the masks that were put behind the text, or the one behind all."""
        behind = range(len(self.ids) - self._cfg.max_tokens, len(self.ids))
        return next((place for place in behind if self.ids[place] in ends), len(self.ids))


def _mask_of(model: LM, tokenizer: Tokenizer) -> int:
    """Returns the mask token. Raises ConfigError for a model that fills in none."""
    if model.cfg.head.labels is not None:
        raise ConfigError(f"fill: the model {model.cfg.head.does()} and fills in no masks. Use lm classify.")
    if model.cfg.kind != "encoder" or model.cfg.head.pooling == "mean":
        remedy = "Use lm embed" if model.cfg.head.pooling == "mean" else "Use lm generate"
        raise ConfigError(f"fill: the model is no encoder whose head predicts tokens, and fills in no masks. {remedy}.")
    if tokenizer.mask is None:
        raise ConfigError("fill: the tokenizer has no mask token (<|mask|>, [MASK] or <mask>). Use a model of objective=mlm or diffusion.")
    return tokenizer.mask
