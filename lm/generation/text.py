"""Text in, text out: prompts to token ids, new tokens to text as they are sampled, and stop strings."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from lm.data.sources.base import Turn
from lm.data.tokenizer.chat import ChatTemplate, answer_end
from lm.data.tokenizer.stream import Stream
from lm.data.tokenizer.together import together
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.generation.beams import search
from lm.generation.config import SamplingConfig
from lm.generation.decode import begin, beyond, decode, room
from lm.generation.drafting.base import Drafter
from lm.generation.grammar import Grammar
from lm.generation.loop import Vocabulary
from lm.generation.sampling import Logprob
from lm.nn.transformer import LM

OnText = Callable[[int, str], None]


@dataclass(frozen=True)
class Completion:
    """The text generated for one prompt. `cut_short`: the context was full before max_tokens tokens were generated; `slid`: the text went
    on beyond the context, and each token saw as many tokens before it as fit; `finish`: "stop" at a stop string or an end token, else
    "length"."""

    text: str
    tokens: list[int]
    cut_short: bool
    slid: bool
    finish: Literal["stop", "length"]
    logprobs: list[Logprob]  # one for each token; empty unless cfg.logprobs asks for them

    @property
    def n_tokens(self) -> int:
        """Returns how many tokens were generated, without the end token."""
        return len(self.tokens)


def complete(
    model: LM,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[Turn]],
    cfg: SamplingConfig,
    on_text: OnText | None = None,
    chat: ChatTemplate | None = None,
    drafter: Drafter | None = None,
    goes_on: bool = False,
) -> list[Completion]:
    """Returns cfg.n completions of each prompt in turn, and calls on_text(row, text) with each piece of text as soon as it is certain:
    whole characters, no part of a stop string. With beam search each text is passed whole, when all beams have ended.

    chat: each prompt is a message of a user, or all turns so far, as this template writes them.  goes_on: as in
    `prompt_ids`. Raises ConfigError for a prompt that is longer than the context or not valid text.
    """
    require_fit(tokenizer, model.vocab_size)
    encoded = [prompt_ids(model, tokenizer, prompt, chat, goes_on) for prompt in prompts]
    alone = chat is not None and not goes_on
    return continued(model, tokenizer, encoded, cfg, ends_of(tokenizer), on_text, drafter, alone=alone)


def continued(
    model: LM,
    tokenizer: Tokenizer,
    encoded: Sequence[Sequence[int]],
    cfg: SamplingConfig,
    ends: Collection[int],
    on_text: OnText | None = None,
    drafter: Drafter | None = None,
    alone: bool = False,
    before: Counter[tuple[int, ...]] | None = None,
) -> list[Completion]:
    """As `complete`, for prompts that are token ids already.  ends: the tokens that end a completion.  alone: a completion is a text of its
    own, such as a chat answer, and not the rest of the prompt's text.  before: as in `row_keys`."""
    grammar, vocabulary = grammar_of(tokenizer, cfg, ends), Vocabulary(tokenizer.vocab_size, ends, tokenizer.pad)
    if cfg.beams > 1:
        best = _by_beams(model, tokenizer, encoded, cfg, vocabulary, grammar, alone)
        if on_text is not None:
            for row, completion in enumerate(best):
                on_text(row, completion.text)
        return best
    begun = [[] if alone else begin(model, ids) for ids in encoded]
    texts = [Continuation(primed(tokenizer, ids), cfg.stops) for ids in begun for _ in range(cfg.n)]

    def tell(row: int, piece: str) -> None:
        if piece and on_text is not None:
            on_text(row, piece)

    def on_token(row: int, token: int) -> bool:
        tell(row, texts[row].push(token))
        return texts[row].stopped

    rows = decode(model, encoded, cfg, vocabulary, on_token=on_token, drafter=drafter, grammar=grammar, before=before)
    for row, text in enumerate(texts):
        tell(row, text.finish())
    given = [ids for ids in encoded for _ in range(cfg.n)]
    return [_completion(model, ids, cfg, text, row.new, row.logprobs) for ids, text, row in zip(given, texts, rows, strict=True)]


def _by_beams(
    model: LM,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    cfg: SamplingConfig,
    vocabulary: Vocabulary,
    grammar: Grammar | None,
    alone: bool,
) -> list[Completion]:
    def ended(tokens: Sequence[int]) -> bool:
        return any(stop in tokenizer.decode(tokens) for stop in cfg.stops)

    found = []
    for ids, beams in zip(prompts, search(model, prompts, cfg, vocabulary, ended=ended, grammar=grammar), strict=True):
        for beam in beams:
            text = Continuation(primed(tokenizer, [] if alone else begin(model, ids)), cfg.stops)
            for token in beam.tokens:
                text.push(token)
            text.finish()
            found.append(_completion(model, ids, cfg, text, beam.tokens, []))
    return found


def _completion(
    model: LM, prompt: Sequence[int], cfg: SamplingConfig, text: "Continuation", new: list[int], told: list[Logprob]
) -> Completion:
    limit = room(model, prompt, cfg)
    full = not text.stopped and len(new) == limit
    return Completion(text.text, new, full and limit < cfg.max_tokens, beyond(model, prompt, len(new)), "length" if full else "stop", told)


def ends_of(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that end a text, in a chat or not, as an export names them: eos, the token at which the chat template ends an
    answer, and further ones."""
    source = tokenizer.chat_template
    found = (tokenizer.eos, None if source is None else answer_end(source, tokenizer), *sorted(tokenizer.further_ends))
    return [token for token in dict.fromkeys(found) if token is not None]


def grammar_of(tokenizer: Tokenizer, cfg: SamplingConfig, ends: Collection[int]) -> Grammar | None:
    """Returns the grammar of cfg's json_schema, regex or grammar, which constrains the output; None where cfg has none of them. Raises
    ConfigError as `Grammar` does, such as where no text matches."""
    return Grammar(tokenizer, cfg, ends) if cfg.form is not None else None


def require_fit(tokenizer: Tokenizer, vocab_size: int, where: str = "tokenizer") -> None:
    """Raises CheckpointError where the tokenizer has ids that the embedding has no row for."""
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{where}: {tokenizer.vocab_size} tokens are more than the {vocab_size} rows of the model's embedding. Use its own tokenizer."
        )


def prompt_ids(
    model: LM, tokenizer: Tokenizer, prompt: str | Sequence[Turn], chat: ChatTemplate | None = None, goes_on: bool = False
) -> list[int]:
    """Returns the token ids that a model reads for a prompt. For a decoder: the text as it begins a document of training, with bos where
    the tokenizer adds it; for an empty text bos, or else eos. For an encoder-decoder: the source as a whole document.

    chat: the ids are instead those that this template writes of the prompt as a user's message, or of all turns, up to where the answer
    begins.  goes_on: up to the end of the last turn instead, the beginning of an answer. Raises ConfigError for a text that is not valid
    Unicode, and for an empty prompt where there is neither bos nor eos.
    """
    turns = [Turn("user", prompt)] if isinstance(prompt, str) else prompt
    text = turns[-1].text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"prompt: character {error.start} ({text[error.start]!r}) is not valid Unicode. Give it as UTF-8.") from None
    if chat is not None:
        return ids_of(tokenizer, chat.question(turns, goes_on))
    if model.cfg.kind == "encoder_decoder":
        return tokenizer.document(text)
    ids = [*tokenizer.prefix, *tokenizer.encode(text)] or tokenizer.suffix
    if not ids:
        raise ConfigError("prompt: it is empty, and the tokenizer has neither bos nor eos to start from. Give some text.")
    return ids


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
