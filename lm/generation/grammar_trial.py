"""Builds the grammar of a request in a process of its own first: some overflow the stack of llguidance, which would end the server, and
some take minutes, in which no request is read."""

import json
from collections.abc import Collection
from pathlib import Path

from lm.data.tokenizer.sandbox import Program
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.grammar import source_of

_PROGRAM = str(Path(__file__).with_name("grammar_program.py"))


class Trial:
    """A process that tries out grammars over one vocabulary, from the first one on."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._program: Program | None = None

    def require(self, cfg: SamplingConfig) -> None:
        """Raises ConfigError where the grammar of cfg takes too much time or memory, or breaks llguidance; and as `source_of`."""
        if cfg.form is None or not self._ends:  # no end, as `Grammar` says
            return
        source = source_of(cfg)
        if self._program is None:
            self._program = Program(_PROGRAM, [json.dumps(self._tokenizer.content()), self._tokenizer.vocab_size, sorted(self._ends)])
        if "error" in self._program.begun:  # so that `Grammar` refuses the vocabulary
            return
        if error := self._program.ask(source).get("error"):
            raise ConfigError(f"{cfg.form}: it is too large or too deep ({error}). Give a simpler one.")
