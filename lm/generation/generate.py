"""`lm.generate` and `lm.complete`: from a prompt, or messages, to text."""

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from lm.data.sources.base import Turn
from lm.data.tokenizer.gap import Gap
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.answering import turns_of
from lm.generation.config import GenerateConfig
from lm.generation.load import drafter_of, expect_loaded
from lm.generation.writer import Completion, Writer
from lm.nn.transformer import LM
from lm.ops.defaults import device_unset
from lm.schema import from_tree

Messages = Sequence[Mapping[str, Any]]
"""A chat: messages as of OpenAI's API, {"role": "user", "content": "..."}, ..."""


@overload
def generate(model: LM, tokenizer: Tokenizer, prompt: str | Messages, *, n: int, **options: Any) -> list[str]: ...
@overload
def generate(model: LM, tokenizer: Tokenizer, prompt: str | Messages, **options: Any) -> str: ...
@overload
def generate(model: LM, tokenizer: Tokenizer, prompt: Sequence[Messages], **options: Any) -> list[str]: ...
@overload
def generate(model: LM, tokenizer: Tokenizer, prompt: list[str], *, chat: bool = False, **options: Any) -> list[str]: ...
def generate(
    model: LM,
    tokenizer: Tokenizer,
    prompt: Any,
    *,
    suffix: str | None = None,
    chat: bool = False,
    continue_final_message: bool = False,
    **options: Any,
) -> str | list[str]:
    """Returns the text that follows the prompt, or each of several; from an encoder-decoder, its answer to the prompt as a source; and to
    the messages of a chat, or of several chats, the assistant's next answer, under the tokenizer's chat template.

    suffix: text behind; what fills the gap between a prompt and it is returned, by a model of objective=fim, or another that has learned to
    fill in the middle.  chat: the prompt is a user's message, and the template is put around it.  continue_final_message: the last of the
    messages, the assistant's, is gone on with instead.  options: the fields of GenerateConfig (max_tokens, temperature, seed, stop, ...);
    with n=4 a list of four texts of each prompt in turn; beams with a grammar that allows fewer give fewer, so ask one prompt at a time
    there.
    """
    found = complete(model, tokenizer, prompt, suffix=suffix, chat=chat, continue_final_message=continue_final_message, **options)
    texts = [completion.text for completion in found]
    return texts[0] if _is_one(prompt) and "n" not in options else texts


@device_unset()
def complete(
    model: LM,
    tokenizer: Tokenizer,
    prompt: str | list[str] | Messages | Sequence[Messages],
    *,
    suffix: str | None = None,
    chat: bool = False,
    continue_final_message: bool = False,
    **options: Any,
) -> list[Completion]:
    """As `generate`, but returns each text with its tokens, why it ended, and with logprobs=N the log p of its tokens and of the N
    likeliest."""
    expect_loaded(model, tokenizer)
    numbers = {key: value.item() if isinstance(value, np.generic) else value for key, value in options.items()}
    try:
        cfg = from_tree(GenerateConfig, numbers)
    except TypeError as error:
        raise ConfigError(f"options: {error}. Give numbers, texts, lists and dicts.") from None
    asked = _asked(prompt)
    chats = any(not isinstance(each, str) for each in asked)
    if continue_final_message and not chats:
        raise ConfigError("continue_final_message: it is of the messages of a chat. Give them as the prompt, or leave it out.")
    writer = Writer(model, tokenizer, cfg, drafter_of(model, tokenizer, cfg))
    if suffix is not None:
        if chat or chats:
            raise ConfigError("suffix: a chat has none. Give a text as the prompt, or leave it out.")
        if not isinstance(suffix, str):
            raise ConfigError(f"suffix: {suffix!r:.80} is no text. Give the text behind the gap.")
        return writer.in_gaps().complete([Gap(str(each), suffix) for each in asked])
    return (writer.in_chat(continue_final_message) if chat or chats else writer).complete(asked)


def _is_one(prompt: Any) -> bool:
    """Whether a prompt is one text or one chat, and not several."""
    return isinstance(prompt, str) or (isinstance(prompt, list | tuple) and any(isinstance(each, Mapping) for each in prompt))


def _asked(prompt: Any) -> list[str | list[Turn]]:
    several: Any = [prompt] if _is_one(prompt) else prompt
    if isinstance(several, list | tuple) and all(isinstance(each, str) for each in several):
        return [*several]
    if not isinstance(several, list | tuple) or not all(_is_one(each) and not isinstance(each, str) for each in several):
        given = f"prompt: {prompt!r:.80} is no text and no chat"
        raise ConfigError(f"{given}. Give one, or a list of several of one kind; of ids the text is tokenizer.decode(ids).")
    places = ["prompt"] if _is_one(prompt) else [f"prompt {number}" for number in range(len(several))]
    return [turns_of({"messages": [*messages]}, where) for messages, where in zip(several, places, strict=True)]
