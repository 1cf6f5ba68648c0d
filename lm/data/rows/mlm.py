"""Rows for masked language modelling: some tokens are hidden or replaced, and predicted from both sides."""

import re
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from lm.data.layout.windows import PADDING, Packing
from lm.data.order import Ids, uniforms
from lm.data.rows.base import LikelihoodConfig, Material, Rows
from lm.data.rows.packed import PackedRows
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED, Batch

_WORD = re.compile(rb"[^\W_]")


class MLMConfig(LikelihoodConfig):
    """Predict masked tokens from both sides. Devlin et al. 2018, arXiv:1810.04805, section 3.1."""

    models = ("encoder",)
    usual_for = ("encoder",)
    packings = ("split", "fit")

    kind: Literal["mlm"] = "mlm"
    mask_frac: float = Field(0.15, gt=0, lt=1)
    """Part of the tokens that are predicted."""
    hidden_frac: float = Field(0.8, ge=0, le=1)
    """Part of those that are shown as the mask token."""
    random_frac: float = Field(0.1, ge=0, le=1)
    """Part of those that are shown as another token; the rest is shown as it is."""
    whole_words: bool = False
    """All tokens of a word are predicted, or none; needs a byte-level tokenizer."""

    @model_validator(mode="after")
    def _no_more_than_all(self) -> Self:
        if (shown := self.hidden_frac + self.random_frac) > 1 + 1e-9:
            raise ValueError(
                f"hidden_frac={self.hidden_frac:g} and random_frac={self.random_frac:g} are {shown:g} together. Make them 1 or less."
            )
        return self

    def specials(self) -> tuple[str, ...]:
        return ("<|mask|>",)

    def rows(self, of: Material) -> Rows:
        return MLMRows(self, of.packing(ahead=0), of.tokenizer, of.seed)


class MLMRows(PackedRows):
    """Each token is predicted with probability mask_frac, independently of the others; special tokens never are.

    Of the predicted tokens hidden_frac are replaced by the mask token, random_frac by a token drawn uniformly from the non-special ones.
    With whole_words a word's first token decides for the whole word. BERT predicts exactly 15 % of a row, which is the same on average.
    """

    def __init__(self, cfg: MLMConfig, packing: Packing, tokenizer: Tokenizer, seed: int) -> None:
        if tokenizer.mask is None:
            raise ConfigError("objective=mlm: the tokenizer has no mask token (<|mask|>, [MASK] or <mask>). Add one by tokenizer.specials.")
        super().__init__(packing, tokenizer, seed)
        self._cfg, self._mask = cfg, tokenizer.mask
        special = tokenizer.special_ids()
        self._plain = np.setdiff1d(np.arange(tokenizer.vocab_size), special)
        self._special = np.isin(np.arange(tokenizer.vocab_size), special)
        self._continues = _continues(tokenizer) if cfg.whole_words else None

    def documents(self, ids: Ids) -> Ids:
        return self.packing.documents(ids)

    def batch(self, ids: Ids, draw: int = 0) -> Batch:
        packed = self.packing.read(ids)
        tokens, s = packed.tokens, packed.tokens.shape[1]
        chance = uniforms(self.seed, draw, ids, 2 * s)
        chosen, shown_as = chance[:, :s], chance[:, s:]
        open_to_choice = (tokens != PADDING) & ~self._special[tokens]
        if self._continues is not None:
            chosen = _as_word(chosen, self._continues[tokens] & open_to_choice & np.roll(open_to_choice, 1, axis=1))
        predicted = open_to_choice & (chosen < self._cfg.mask_frac)
        labels = np.where(predicted, tokens, IGNORED)
        hidden = predicted & (shown_as < self._cfg.hidden_frac)
        replaced = predicted & ~hidden & (shown_as < self._cfg.hidden_frac + self._cfg.random_frac)
        drawn = (shown_as - self._cfg.hidden_frac) / max(self._cfg.random_frac, 1e-9)
        others = self._plain[np.clip(drawn * len(self._plain), 0, len(self._plain) - 1).astype(np.int64)]
        packed.tokens = np.where(hidden, self._mask, np.where(replaced, others, tokens))
        return Batch(packed.padded(self.pad), torch.from_numpy(labels), packed.positions, packed.documents)


def _continues(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Returns (v,) bool: whether a token continues the previous token's word: it begins with a letter or digit, not with a space."""
    if tokenizer.token_bytes() is None:
        raise ConfigError("objective.whole_words: the tokenizer's tokens are not bytes, and words are told by bytes. Set it to false.")
    texts = [tokenizer.token_text(i) or b" " for i in range(tokenizer.vocab_size)]
    return np.array([_WORD.match(text) is not None or text[0] >= 0x80 for text in texts])


def _as_word(chosen: NDArray[np.float64], continues: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns the numbers with that of a word's first token repeated at all tokens of the word."""
    at = np.arange(chosen.shape[1])
    first = np.maximum.accumulate(np.where(continues, 0, at), axis=1)
    return np.take_along_axis(chosen, first, axis=1)
