"""What a tokenizer's chat template writes around answers, as tokens."""

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.together import together
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError


def never_ends(source: str, tokenizer: Tokenizer) -> bool:
    """Returns whether a template writes no special token after an answer; False where it refuses a plain chat."""
    try:
        return not ChatTemplate(source, "tokenizer", tokenizer).closing()
    except ConfigError:
        return False


def closing_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that the tokenizer's chat template writes after an answer, from the special one on that ends it; () where it
    writes none, or refuses a plain chat, or there is no template."""
    return () if tokenizer.chat_template is None else _around_answers(tokenizer.chat_template, tokenizer)[1]


def opening_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that the tokenizer's chat template writes before a last answer without thoughts, behind the request for one; ()
    as in `closing_of`."""
    return () if tokenizer.chat_template is None else _around_answers(tokenizer.chat_template, tokenizer)[0]


@lru_cache(maxsize=8)  # a template is rendered in a process of its own
def _around_answers(source: str, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    with suppress(ConfigError):
        template = ChatTemplate(source, "tokenizer", tokenizer)
        opening, closing = (together(tokenizer, parts)[0] if parts else [] for parts in (template.opening(), template.closing()))
        return tuple(map(int, opening)), tuple(map(int, closing))
    return (), ()


def replying(tokenizer: Tokenizer, role: str) -> Callable[[str], list[int | str]]:
    """Returns `ChatTemplate.replying` of the tokenizer's template. Raises ConfigError as that, and where there is none."""
    if tokenizer.chat_template is None:
        raise ConfigError("objective.environment: its replies are written by a chat template, and there is none. Set data.record.template.")
    return ChatTemplate(tokenizer.chat_template, "tokenizer", tokenizer).replying(role)
