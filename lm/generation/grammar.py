"""Constrained decoding: the output is JSON of a schema, a match of a regex, or a text of a grammar. Tokens that lead to no such output are
never drawn."""

import json
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.sampling import common

if TYPE_CHECKING:
    from llguidance import LLMatcher


def source_of(cfg: SamplingConfig) -> str:
    """Returns a json_schema, regex or grammar as llguidance reads it. Raises ConfigError where that is not installed, or cannot."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ConfigError(f"{cfg.form}: this needs llguidance. Run pip install 'slotlm[grammar]', or leave it out.") from None
    try:
        return {
            "json_schema": lambda: LLMatcher.grammar_from_json_schema(cfg.json_schema or "", overrides={"whitespace_flexible": False}),
            "regex": lambda: LLMatcher.grammar_from_regex(cfg.regex or ""),
            "grammar": lambda: LLMatcher.grammar_from_lark(cfg.grammar or ""),
        }[cfg.form or ""]()
    except ValueError as error:
        raise ConfigError(f"{cfg.form}: {str(error).splitlines()[0]}. Correct it.") from None


class Grammar:
    """A grammar over one vocabulary, by llguidance: an Earley parser over derivatives of regexes, with a trie of the tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer, cfg: SamplingConfig, ends: Collection[int]) -> None:
        """cfg: has one of json_schema, regex and grammar.  ends: the end tokens, which are allowed only where the output is complete.

        Raises ConfigError where no text matches, where there is no end token, or where llguidance is not installed.
        """
        source = source_of(cfg)
        from llguidance import LLMatcher, LLTokenizer

        if not ends:
            raise ConfigError(f"{cfg.form}: the tokenizer has no token that ends a text, and one must end. Leave it out.")
        self.ends = frozenset(ends)
        try:
            vocabulary = LLTokenizer(json.dumps(tokenizer.content()), n_vocab=tokenizer.vocab_size, eos_token=sorted(ends))
        except ValueError as error:
            reason = str(error).splitlines()[0][:100]
            raise ConfigError(f"{cfg.form}: llguidance cannot read this tokenizer ({reason}). Leave it out.") from None
        self._first = LLMatcher(vocabulary, source)
        if self._first.is_error():
            raise ConfigError(f"{cfg.form}: {' '.join(self._first.get_error().split())[:200]}. Correct it.")
        begun = self._first.deep_copy()
        begun.compute_bitmask()
        if begun.get_error().startswith("NoExtensionBias"):  # neither a token may come first nor the end
            raise ConfigError(f"{cfg.form}: no text matches it, not even an empty one. Correct it.")

    def matcher(self) -> "Matcher":
        """Returns a matcher for one row, before its first new token."""
        return Matcher(self._first, self.ends)


class Matcher:
    """Follows the new tokens of one row, and rolls back those of a rejected draft."""

    def __init__(self, first: "LLMatcher", ends: frozenset[int]) -> None:
        """first: what has read no token; it is copied."""
        self._first, self._matcher, self._ends = first, first.deep_copy(), ends
        self._read: list[int] = []

    def allowed(self, new: Sequence[int], v: int) -> Tensor:
        """Returns which of v tokens may follow `new`, (v,) bool. Behind a drafted token that is not allowed itself all may: the place
        before it rejects that draft."""
        text = list(takewhile(lambda token: token not in self._ends, new))
        if self._matcher.is_error():  # for good, whereas another draft or beam may be within the limits
            self._matcher, self._read = self._first.deep_copy(), []
        kept = common(self._read, text)
        self._matcher.rollback(len(self._read) - kept)
        self._read = text[: kept + self._matcher.try_consume_tokens(text[kept:])]
        if len(self._read) < len(new) and not self._matcher.is_error():
            return torch.ones(v, dtype=torch.bool)
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")[:v]
        found = torch.from_numpy(bits.astype(bool))
        if self._matcher.is_error():  # its limits on the size of a parse are reached: the text can only end
            found[sorted(self._ends)] = True
        return found
