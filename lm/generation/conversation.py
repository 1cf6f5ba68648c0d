"""A conversation: the prompt of each answer is all turns so far, as far as the context holds them."""

from collections.abc import Callable

from lm.data.sources.base import ASSISTANT, Turn
from lm.errors import ConfigError
from lm.generation.writer import Completion, Writer


class Conversation:
    """The turns so far; the oldest ones are forgotten where they leave no room for an answer."""

    def __init__(self, writer: Writer) -> None:
        """writer: one of answers, in a chat."""
        self._writer = writer
        self.turns: list[Turn] = []

    def answer(self, text: str, on_text: Callable[[str], None]) -> Completion:
        """Adds the user's message and the answer to it, which `on_text` gets piece by piece. After a ConfigError the turns are as
        before."""
        turns = self._fitting([*self.turns, Turn("user", text)])
        [found] = self._writer.complete([turns], lambda row, piece: on_text(piece))
        self.turns = [*turns, Turn(ASSISTANT, found.text)]
        return found

    def reset(self) -> None:
        """Forgets all turns."""
        self.turns = []

    def _fitting(self, turns: list[Turn]) -> list[Turn]:
        context = self._writer.model.max_seq_len
        longest = context - min(self._writer.cfg.max_tokens, context // 2)
        while (n := len(self._writer.ids(turns))) > longest and len(turns) > 2:
            turns = turns[2:]
        if n >= context:
            raise ConfigError(f"prompt: it has {n} tokens, and the context is model.max_seq_len={context}. Say it shorter.")
        return turns
