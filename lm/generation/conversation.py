"""A conversation: the prompt of each answer is all turns so far, as far as the context holds them."""

from collections.abc import Callable

from lm.data.sources.base import ASSISTANT, Turn
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.drafting.base import Drafter
from lm.generation.text import Completion, chat_template, complete, prompt_ids
from lm.nn.transformer import LM


class Conversation:
    """The turns so far; the oldest ones are forgotten where they leave no room for an answer."""

    def __init__(self, model: LM, tokenizer: Tokenizer, cfg: SamplingConfig, drafter: Drafter | None) -> None:
        """Raises ConfigError where the tokenizer has no chat template."""
        self._model, self._tokenizer, self._cfg, self._drafter = model, tokenizer, cfg, drafter
        self._template = chat_template(tokenizer)
        self.turns: list[Turn] = []

    def answer(self, text: str, on_text: Callable[[str], None]) -> Completion:
        """Adds the user's message and the answer to it, which `on_text` gets piece by piece. After a ConfigError the turns are as
        before."""
        turns = self._fitting([*self.turns, Turn("user", text)])
        [found] = complete(
            self._model, self._tokenizer, [turns], self._cfg, lambda row, piece: on_text(piece), self._template, self._drafter
        )
        self.turns = [*turns, Turn(ASSISTANT, found.text)]
        return found

    def reset(self) -> None:
        """Forgets all turns."""
        self.turns = []

    def _fitting(self, turns: list[Turn]) -> list[Turn]:
        context = self._model.max_seq_len
        longest = context - min(self._cfg.max_tokens, context // 2)
        while (n := len(prompt_ids(self._model, self._tokenizer, turns, self._template))) > longest and len(turns) > 2:
            turns = turns[2:]
        if n >= context:
            raise ConfigError(f"prompt: it has {n} tokens, and the context is model.max_seq_len={context}. Say it shorter.")
        return turns
