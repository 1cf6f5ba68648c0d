"""Text in, text out: prompts to ids, ids to text as they come, stop texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lm.data.sources.base import Turn
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.stream import Stream
from lm.data.tokenizer.together import together
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.generation.beams import search
from lm.generation.config import SamplingConfig
from lm.generation.decode import begin, beyond, decode, room
from lm.generation.drafting.base import Drafter
from lm.generation.grammar import Grammar
from lm.generation.sampling import Logprob
from lm.nn.transformer import LM

OnText = Callable[[int, str], None]


@dataclass(frozen=True)
class Completion:
    """What follows a prompt, or answers a source. `cut_short`: the context was full before max_tokens were there; `slid`: it went on beyond
    the context, and each token saw as many before it as fit; `finish`: "stop" at a stop text or at an end, else "length"."""

    text: str
    tokens: list[int]
    cut_short: bool
    slid: bool
    finish: Literal["stop", "length"]
    logprobs: list[Logprob]  # one of each token, where they were asked for

    @property
    def n_tokens(self) -> int:
        """Returns how many tokens were drawn, without one that ends the text."""
        return len(self.tokens)


def complete(
    model: LM,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[Turn]],
    cfg: SamplingConfig,
    on_text: OnText | None = None,
    chat: ChatTemplate | None = None,
    drafter: Drafter | None = None,
) -> list[Completion]:
    """cfg.n completions of each prompt in turn, and on_text(row, text) for each piece as soon as it is certain: whole characters, no part
    of a stop text; of beams, when all have ended.

    chat: prompts are messages of a user, or all turns so far, and completions end where this template ends an answer. Raises ConfigError
    for a prompt that is longer than the context or not valid text.
    """
    require_fit(tokenizer, model.vocab_size)
    encoded = [prompt_ids(model, tokenizer, prompt, chat) for prompt in prompts]
    return continued(model, tokenizer, encoded, cfg, ends_of(tokenizer, chat), on_text, drafter, alone=chat is not None)


def continued(
    model: LM,
    tokenizer: Tokenizer,
    encoded: Sequence[Sequence[int]],
    cfg: SamplingConfig,
    ends: set[int],
    on_text: OnText | None = None,
    drafter: Drafter | None = None,
    alone: bool = False,
) -> list[Completion]:
    """`complete` of prompts that are ids already.  ends: the tokens that end a completion.  alone: it is a text of its own, as an answer
    is, and not the rest of one."""
    grammar = grammar_of(tokenizer, cfg, ends)
    if cfg.beams > 1:
        best = _by_beams(model, tokenizer, encoded, cfg, ends, grammar, alone)
        if on_text is not None:
            for row, completion in enumerate(best):
                on_text(row, completion.text)
        return best
    before = [[] if alone else begin(model, ids) for ids in encoded]
    texts = [Continuation(primed(tokenizer, ids), cfg.stops) for ids in before for _ in range(cfg.n)]

    def tell(row: int, piece: str) -> None:
        if piece and on_text is not None:
            on_text(row, piece)

    def on_token(row: int, token: int) -> bool:
        tell(row, texts[row].push(token))
        return texts[row].stopped

    rows = decode(
        model,
        encoded,
        cfg,
        ends=ends,
        pad=tokenizer.pad,
        n_tokens=tokenizer.vocab_size,
        on_token=on_token,
        drafter=drafter,
        grammar=grammar,
    )
    for row, text in enumerate(texts):
        tell(row, text.finish())
    given = [ids for ids in encoded for _ in range(cfg.n)]
    return [_completion(model, ids, cfg, text, row.new, row.logprobs) for ids, text, row in zip(given, texts, rows, strict=True)]


def _by_beams(
    model: LM,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    cfg: SamplingConfig,
    ends: set[int],
    grammar: Grammar | None,
    alone: bool,
) -> list[Completion]:
    def ended(tokens: Sequence[int]) -> bool:
        return any(stop in tokenizer.decode(tokens) for stop in cfg.stops)

    found = []
    searched = search(model, prompts, cfg, ends=ends, pad=tokenizer.pad, n_tokens=tokenizer.vocab_size, ended=ended, grammar=grammar)
    for ids, beams in zip(prompts, searched, strict=True):
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


def ends_of(tokenizer: Tokenizer, chat: ChatTemplate | None) -> set[int]:
    """Returns the tokens that end a text, or an answer under this template."""
    usual = (tokenizer.eos, chat.end() if chat is not None else None)
    return {token for token in (*usual, *tokenizer.further_ends) if token is not None}


def grammar_of(tokenizer: Tokenizer, cfg: SamplingConfig, ends: set[int]) -> Grammar | None:
    """Returns what an output must be; None where it may be anything. Raises ConfigError where nothing is such."""
    return Grammar(tokenizer, cfg, ends) if cfg.form is not None else None


def require_fit(tokenizer: Tokenizer, vocab_size: int, where: str = "tokenizer") -> None:
    """CheckpointError where the tokenizer has ids that the embedding has no row for."""
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{where}: {tokenizer.vocab_size} tokens are more than the {vocab_size} rows of the model's embedding. Use its own tokenizer."
        )


def prompt_ids(model: LM, tokenizer: Tokenizer, prompt: str | Sequence[Turn], chat: ChatTemplate | None = None) -> list[int]:
    """What a document that starts with this text starts with, for an empty one bos, or else eos; for an encoder-decoder, all of a source.

    chat: what this template makes of it as a user's message, or of all turns, up to where the answer begins. Raises ConfigError.
    """
    turns = [Turn("user", prompt)] if isinstance(prompt, str) else prompt
    text = turns[-1].text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"prompt: character {error.start} ({text[error.start]!r}) is not valid Unicode. Give it as UTF-8.") from None
    if chat is not None:
        return ids_of(tokenizer, chat.question(turns))
    if model.cfg.kind == "encoder_decoder":
        return tokenizer.document(text)
    ids = [*tokenizer.prefix, *tokenizer.encode(text)] or tokenizer.suffix
    if not ids:
        raise ConfigError("prompt: it is empty, and the tokenizer has neither bos nor eos to start from. Give some text.")
    return ids


def ids_of(tokenizer: Tokenizer, parts: Sequence[int | str]) -> list[int]:
    """Returns the ids of what a template writes."""
    ids, _, _ = together(tokenizer, parts)
    return [int(i) for i in ids]


def chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's own; ConfigError where it has none."""
    if tokenizer.chat_template is None:
        raise ConfigError("chat=true: the model's tokenizer has no chat template. Leave it out, or use a model fine-tuned on chats.")
    return ChatTemplate(tokenizer.chat_template, "tokenizer", tokenizer)


def primed(tokenizer: Tokenizer, prompt: Sequence[int]) -> Stream:
    """A stream behind the prompt: some tokenizers write no space before the very first token."""
    stream = Stream(tokenizer)
    for token in prompt:
        stream.push(token)
    return stream


class Continuation:
    """The text of one row as it grows."""

    def __init__(self, stream: Stream, stop: Sequence[str]) -> None:
        self.text = ""
        self.stopped = False
        self._stream, self._stop = stream, stop
        self._held = ""

    def push(self, token: int) -> str:
        """What is certain to stay, as far as not returned before."""
        return self._add(self._stream.push(token))

    def finish(self) -> str:
        """What was held back, when the row has ended."""
        if self.stopped:
            return ""
        sure = self._add(self._stream.flush())
        rest, self._held = self._held, ""
        self.text += rest
        return sure + rest

    def _add(self, piece: str) -> str:
        held = self._held + piece
        found = [at for stop in self._stop if (at := held.find(stop)) >= 0]
        self.stopped = bool(found)
        sure = min(found) if found else len(held) - _unsure(held, self._stop)
        self._held = "" if found else held[sure:]
        self.text += held[:sure]
        return held[:sure]


def _unsure(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the start of a stop text."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)
