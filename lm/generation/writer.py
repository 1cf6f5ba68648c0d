"""Text in, text out: prompts to token ids, new tokens to text as they are sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self

from lm.data.sources.base import Turn
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.gap import EXTREME, Gap, gap_ends, gap_ids, mode_ids, span_ids
from lm.data.tokenizer.source import source_of
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.beams import search
from lm.generation.config import SamplingConfig
from lm.generation.decode import begin, go_on, room, rows_of
from lm.generation.drafting.base import Drafter
from lm.generation.grammar import Grammar
from lm.generation.loop import Row, Vocabulary
from lm.generation.sampling import Logprob
from lm.generation.text import Continuation, chat_template, ends_of, ids_of, primed, require_fit, special_named
from lm.nn.transformer import LM

Asked = str | Gap | Sequence[Turn]
OnText = Callable[[int, str], None]
OnDone = Callable[[int, list["Completion"]], None]


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


@dataclass(frozen=True)
class Writer:
    """A model, and how it writes. Raises CheckpointError where the tokenizer has ids that the model's embedding has no row for."""

    model: LM
    tokenizer: Tokenizer
    cfg: SamplingConfig = field(default_factory=SamplingConfig)
    drafter: Drafter | None = None
    chat: ChatTemplate | None = None
    """Writes each prompt, a user's message or all turns so far. None: the model reads it as it is."""
    goes_on: bool = True
    """What is written goes on with the prompt's text, in a chat with the last message's. False: it is a text of its own, as an answer."""
    fills: bool = False
    """Each prompt is a gap in a text, and what is written ends where the gap does."""

    def __post_init__(self) -> None:
        require_fit(self.tokenizer, self.model.vocab_size)

    def in_chat(self, goes_on: bool = False) -> Self:
        """Returns a writer of answers under the tokenizer's own chat template.  goes_on: the last message, the assistant's, is gone on with
        instead. Raises ConfigError where there is no template."""
        return replace(self, chat=chat_template(self.tokenizer), goes_on=goes_on)

    def in_gaps(self) -> Self:
        """Returns a writer of what fills gaps. Raises ConfigError for a model that continues nothing, or has no tokens to be asked with."""
        begin(self.model, [0])
        self._gap(Gap("", ""))
        return replace(self, fills=True)

    @property
    def answers(self) -> bool:
        """Whether what is written is a text of its own, and no part of the prompt's."""
        return self.chat is not None or self._reads_source

    @property
    def _reads_source(self) -> bool:
        if self.chat is not None or self.fills or self.model.asked_as == "modes":
            return False
        return self.model.cfg.kind == "encoder_decoder" or self.model.asked_as == "source"

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's tokens, the grammar of cfg's json_schema, regex or grammar, and cfg.first_token. Raises ConfigError as `Grammar`
        does, such as where no text matches, and for a first token that there is not."""
        ends, first = ends_of(self.tokenizer), self.cfg.first_token
        ends += [token for token in gap_ends(self.tokenizer) if token not in ends] if self.fills else []
        if first is not None and self.model.cfg.kind != "encoder_decoder":
            raise ConfigError("first_token: it is of an encoder-decoder's answers, and the model is a decoder. Leave it out.")
        grammar = Grammar(self.tokenizer, self.cfg, ends) if self.cfg.form is not None else None
        given = None if first is None else special_named(self.tokenizer, first, "first_token")
        return Vocabulary(self.tokenizer.vocab_size, ends, self.tokenizer.pad, grammar, given)

    def ids(self, prompt: Asked) -> list[int]:
        """Returns the token ids that the model reads for a prompt. In a chat: those of what the template writes up to where the answer
        begins, or goes on. Else for a decoder: the text as it begins a document of training, with bos where the tokenizer adds it; for an
        empty text bos, or else eos. For an encoder-decoder, or a decoder that has learned pairs (objective=seq2seq): the text as a source;
        for a model of objective=ul2 the text behind the token of its mode. For a gap: what is around it, and the request to fill it.

        Raises ConfigError for a text that is not valid Unicode, and for an empty prompt where there is neither bos nor eos.
        """
        if isinstance(prompt, Gap):
            _require_unicode(prompt.prefix, "prompt")
            _require_unicode(prompt.suffix, "suffix")
            return self._gap(prompt)
        turns = [Turn("user", prompt)] if isinstance(prompt, str) else prompt
        _require_unicode(text := turns[-1].text, "prompt")
        if self.chat is not None:
            return ids_of(self.tokenizer, self.chat.question(turns, self.goes_on))
        if self.model.asked_as == "modes":
            return mode_ids(self.tokenizer, text)
        if self._reads_source:
            return source_of(self.tokenizer, text)
        ids = [*self.tokenizer.prefix, *self.tokenizer.encode(text)] or self.tokenizer.suffix
        if not ids:
            raise ConfigError("prompt: it is empty, and the tokenizer has neither bos nor eos to start from. Give some text.")
        return ids

    def _gap(self, gap: Gap) -> list[int]:
        encodes, asked_as = self.model.cfg.kind == "encoder_decoder", self.model.asked_as
        if encodes or asked_as in ("spans", "modes"):
            return span_ids(self.tokenizer, gap, EXTREME if asked_as == "modes" else None, ended=encodes)
        return gap_ids(self.tokenizer, gap)

    def rows(self, encoded: Sequence[Sequence[int]], keys: Sequence[bytes] | None = None) -> list[Row]:
        """As `rows_of`."""
        return rows_of(self.model, encoded, self.cfg, self.vocabulary, keys)

    def text_of(self, row: Row) -> Continuation:
        """Returns the text of a row that has no new tokens yet."""
        before = (row.source or row.begin) if self.goes_on and not self._reads_source else []
        return Continuation(primed(self.tokenizer, before), self.cfg.stops)

    def complete(self, prompts: Sequence[Asked], on_text: OnText | None = None) -> list[Completion]:
        """Returns cfg.n completions of each prompt in turn, and calls on_text(row, text) with each piece of text as soon as it is certain:
        whole characters, no part of a stop string. With beam search each text is passed whole, when all beams have ended.

        Raises ConfigError for a prompt that is longer than the context or not valid text.
        """
        return self.continued([self.ids(prompt) for prompt in prompts], on_text)

    def continued(
        self,
        encoded: Sequence[Sequence[int]],
        on_text: OnText | None = None,
        keys: Sequence[bytes] | None = None,
        on_done: OnDone | None = None,
    ) -> list[Completion]:
        """As `complete`, for prompts that are token ids already.  keys: as in `rows_of`; on_done(i, completions): called with those of
        prompt i as soon as the last of them has ended."""
        if self.cfg.beams > 1:
            return self._by_beams(encoded, on_text, on_done)
        rows = self.rows(encoded, keys)
        texts = [self.text_of(row) for row in rows]
        found: dict[int, Completion] = {}

        def tell(row: int, piece: str) -> None:
            if piece and on_text is not None:
                on_text(row, piece)

        def on_token(row: int, token: int) -> bool:
            tell(row, texts[row].push(token))
            return texts[row].stopped

        def on_end(row: Row) -> None:
            tell(row.index, texts[row.index].finish())
            found[row.index] = self._completion(row, texts[row.index])
            i, n = row.index // self.cfg.n, self.cfg.n
            mine = range(i * n, (i + 1) * n)  # the rows of this prompt
            if on_done is not None and all(each in found for each in mine):
                on_done(i, [found[each] for each in mine])

        longest_first = sorted(rows, key=lambda row: -len(row.source) - len(row.begin))  # rows of a batch take the time of its longest
        go_on(self.model, longest_first, self.cfg, self.vocabulary, on_token, self.drafter, on_end)
        return [found[row] for row in range(len(rows))]

    def _by_beams(self, encoded: Sequence[Sequence[int]], on_text: OnText | None, on_done: OnDone | None) -> list[Completion]:
        def ended(tokens: Sequence[int]) -> bool:
            return any(stop in self.tokenizer.decode(tokens) for stop in self.cfg.stops)

        found: list[Completion] = []
        for i, (ids, beams) in enumerate(zip(encoded, search(self.model, encoded, self.cfg, self.vocabulary, ended), strict=True)):
            for beam in beams:
                first = self.vocabulary.first
                row = Row(b"", begin(self.model, ids, first), beam.tokens, limit=room(self.model, ids, self.cfg, first))
                text = self.text_of(row)
                for token in row.new:
                    text.push(token)
                text.finish()
                found.append(self._completion(row, text))
                if on_text is not None:
                    on_text(len(found) - 1, found[-1].text)
            if on_done is not None:
                on_done(i, found[len(found) - len(beams) :])
        return found

    def _completion(self, row: Row, text: Continuation) -> Completion:
        full = not text.stopped and len(row.new) == row.limit
        slid = row.position > self.model.max_seq_len  # the last token is not fed back
        return Completion(text.text, row.new, full and row.limit < self.cfg.max_tokens, slid, "length" if full else "stop", row.logprobs)


def _require_unicode(text: str, key: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{key}: character {error.start} ({text[error.start]!r}) is not valid Unicode. Give it as UTF-8.") from None
