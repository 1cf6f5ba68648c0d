"""Panics of the tokenizers library, as of a regex of a tokenizer.json that goes back too often."""

from collections.abc import Callable
from typing import Any, TypeVar

from lm.errors import ConfigError

T = TypeVar("T")


def encoded(work: Callable[..., T], text: str | list[str], **options: Any) -> T:
    """Returns what an encoder of the library returns. Raises ConfigError as `sound`, and UnicodeEncodeError for half a surrogate pair, of
    which the library tells no more than that it is no text."""
    try:
        return sound(work, text, **options)
    except TypeError:
        for each in [text] if isinstance(text, str) else text:
            each.encode()
        raise


def sound(work: Callable[..., T], *args: Any, **options: Any) -> T:
    """Returns what a function of the library returns. Raises ConfigError where it panics: that is a BaseException, which no handler of
    errors takes, and which ends a thread."""
    try:
        return work(*args, **options)
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"tokenizer: the tokenizers library breaks on this text ({reason}). Use another tokenizer, or text.") from None
