"""What text is to a tokenizer: the tokens that end it, chats as tokens, and new tokens as text, cut at stop strings."""

from collections.abc import Sequence

from lm.data.tokenizer.around import closing_of
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.stream import Stream
from lm.data.tokenizer.together import together
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.spelling import did_you_mean


def ends_of(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that end a text, in a chat or not, as an export names them: eos, the token at which the chat template ends an
    answer, and further ones."""
    found = (tokenizer.eos, *closing_of(tokenizer)[:1], *sorted(tokenizer.further_ends))
    return [token for token in dict.fromkeys(found) if token is not None]


def require_fit(tokenizer: Tokenizer, vocab_size: int, where: str = "tokenizer") -> None:
    """Raises CheckpointError where the tokenizer has ids that the embedding has no row for."""
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{where}: {tokenizer.vocab_size} tokens are more than the {vocab_size} rows of the model's embedding. Use its own tokenizer."
        )


def special_named(tokenizer: Tokenizer, name: str, where: str) -> int:
    """Returns the id of the special token of this name. Raises ConfigError where there is none.  where: the key that names it."""
    if (found := tokenizer.special([name])) is None:
        remedy = did_you_mean(name[:80], tokenizer.special_names.values())
        raise ConfigError(f"{where}={name[:80]} is no special token of the tokenizer. {remedy}")
    return found


def ids_of(tokenizer: Tokenizer, parts: Sequence[int | str]) -> list[int]:
    """Returns the token ids of what a chat template writes.  parts: texts, and ids of special tokens."""
    ids, _, _ = together(tokenizer, parts)
    return [int(i) for i in ids]


def chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the tokenizer's own chat template. Raises ConfigError where it has none."""
    if tokenizer.chat_template is None:
        raise ConfigError("chat=true: the model's tokenizer has no chat template. Leave it out, or use a model fine-tuned on chats.")
    return ChatTemplate(tokenizer.chat_template, "tokenizer", tokenizer)


def primed(tokenizer: Tokenizer, prompt: Sequence[int]) -> Stream:
    """Returns a stream that has decoded the prompt already: some tokenizers write no space before the very first token of a text."""
    stream = Stream(tokenizer)
    for token in prompt:
        stream.push(token)
    return stream


class Continuation:
    """The text of one row, decoded token by token; what may turn out to be the start of a stop string is held back."""

    def __init__(self, stream: Stream, stop: Sequence[str]) -> None:
        self.text = ""
        self.stopped = False
        self._stream, self._stop = stream, stop
        self._pending = ""

    def push(self, token: int) -> str:
        """Adds a token; returns the text that is certain by now and was not returned before."""
        return self._add(self._stream.push(token))

    def finish(self) -> str:
        """Returns the text that was held back; called once, when the row has ended."""
        if self.stopped:
            return ""
        sure = self._add(self._stream.flush())
        rest, self._pending = self._pending, ""
        self.text += rest
        return sure + rest

    def _add(self, piece: str) -> str:
        text = self._pending + piece
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        sure = min(found) if found else len(text) - _unsure(text, self._stop)
        self._pending = "" if found else text[sure:]
        self.text += text[:sure]
        return text[:sure]


def _unsure(text: str, stop: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that is the start of a stop string."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)
