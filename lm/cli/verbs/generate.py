"""`lm generate from=FOLDER prompt=TEXT`: continues text, or answers it."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lm import collector
from lm.cli.verb import Decoding
from lm.errors import ConfigError
from lm.generation.config import GenerateConfig, SamplingConfig
from lm.printing import answer, due, note, raw, status
from lm.progress import quiet
from lm.schema import MaybeEmpty
from lm.storage.model_folder import folder_hash, resolve_model
from lm.units import counted

if TYPE_CHECKING:
    from lm.data.tokenizer.tokenizer import Tokenizer
    from lm.generation.answering import Prompt
    from lm.generation.writer import Completion, Writer

_NO_MESSAGES = "continue_final_message=true: it is of prompts=FILE with messages. Give them, or leave it out."
_REMEDY = "Write prompt=TEXT, or echo TEXT | lm generate ..."


class Generate(Decoding, GenerateConfig):
    """usage: lm generate from=FOLDER [prompt=TEXT ...] [key=value ...]

    One prompt is continued as you watch; several are decoded together, each
    with the result that it has alone. To an encoder-decoder the prompt is the
    source, with chat=true a user's message to a model fine-tuned on chats, and
    the answer alone is printed. With suffix=TEXT the gap between prompt and it is
    filled, by a model of objective=fim. beams=4 searches for the likeliest text instead
    of drawing one, and n=3 prints the best three. Values are taken literally: a
    prompt or a stop text may hold '=', quotes, commas and line breaks.

    Without a prompt, a model with a chat template holds a conversation: each
    line that you type, or that comes from a pipe, is answered. /reset forgets
    what was said, /exit or Ctrl-D ends. To others, standard input is the prompt.

    prompts=FILE out=FILE answers each line of a file, {"prompt": ...} or
    {"messages": [...]}; killed, the same command goes on.
    """

    other_names = {
        **Decoding.other_names,
        **GenerateConfig.other_names,
        "chat": "apply_chat_template chat_template instruct",
        "prompt": "input inputs text",
        "prompts": "file input_file prompt_file prompts_file",
        "suffix": "input_suffix",
    }

    prompt: MaybeEmpty | list[MaybeEmpty] | None = None
    """Text to continue, or the source of an encoder-decoder; may be given several times. Empty: a new document. null: standard input."""
    suffix: MaybeEmpty | None = None
    """Text behind: what is written fills the gap between the prompt and it (fill in the middle). null: none."""
    prompts: str | None = None
    """File of JSON lines, each with `prompt` (and `suffix`) or `messages`. The lines go to `out` with `answers` added, in what format=json
    prints of a sample. null: none."""
    out: str | None = None
    """With prompts: file of the answers, which is there when it is complete."""
    overwrite: bool = False
    """With out: replace the file, and what a start that asked otherwise has left of it."""
    chat: bool | None = None
    """The prompt is a user's message under the tokenizer's chat template. null: where neither prompt nor prompts is given and there is a
    template, and for messages."""
    continue_final_message: bool = False
    """With messages: the last one, the assistant's, is gone on with, instead of a further one begun; answers are what comes behind it."""
    merge: bool = True
    """An adapter becomes part of the weights; otherwise it computes beside them."""
    format: Literal["text", "json"] = "text"
    """json: a list of what each sample is, with its tokens, why it ended and its logprobs."""

    def run(self, rest: list[str]) -> None:
        """Prints text on stdout, notes on stderr."""
        self.refuse(rest)
        files = self._files()
        if self.prompt is None and files is None and (sys.stdin is None or sys.stdin.closed):
            raise ConfigError(f"prompt: none was given, and standard input is closed. {_REMEDY}.")
        if self.compile and self.beams > 1:
            raise ConfigError(f"compile=true is for rows that stay in place, and beams={self.beams} move. Leave one of them out.")
        folder = resolve_model(self.from_)
        with collector.paused():
            from lm.generation.load import drafter_of, load
            from lm.generation.writer import Writer

        if files is not None:  # before the model, which takes longer
            from lm.generation.answering import read_prompts
            from lm.generation.lines import require_lines

            require_lines(files[1], self.overwrite, read=files[0])
            prompts = read_prompts(files[0])
        model, tokenizer = load(folder, self.device, self.merge, self.dtype, self.cache, self.compile)
        drafter = drafter_of(model, tokenizer, self, self.dtype, self.compile)
        writer = Writer(model, tokenizer, self, drafter)
        if files is not None:
            self._answer_all(prompts, files[1], folder_hash(folder), writer)
        elif self.prompt is None and self.suffix is None and (self.chat or (self.chat is None and tokenizer.chat_template is not None)):
            with quiet():  # else progress would be printed over the user's input
                self._converse(writer)
        else:
            self._complete(writer)
        if drafter is not None:
            note(drafter.tally.sentence())

    def _files(self) -> tuple[Path, Path] | None:
        """Returns the file of prompts and that of the answers; None where there are none. Raises ConfigError for one without the other, and
        for what goes with neither."""
        if self.prompts is None and (self.out is not None or self.overwrite):
            raise ConfigError("out, overwrite: they are of prompts=FILE, which is not set. Set it, or leave them out.")
        if self.prompts is None and self.continue_final_message:
            raise ConfigError(_NO_MESSAGES)
        if self.prompts is not None and self.out is None:
            raise ConfigError("prompts: the answers need a file. Write out=FILE.")
        if self.prompts is not None and (self.prompt is not None or self.suffix is not None or self.format != "text"):
            raise ConfigError("prompt, suffix, format: prompts=FILE has them, and a format of its own. Leave them out.")
        if self.prompts is None or self.out is None:
            return None
        return Path(os.path.expanduser(self.prompts)), Path(os.path.expanduser(self.out))

    def _answer_all(self, prompts: "list[Prompt]", out: Path, of: str, writer: "Writer") -> None:
        from lm.generation.answering import answer_all

        self.require(writer.tokenizer.vocab_size)
        first = prompts[0].asked
        if isinstance(first, list):
            self._require_template(writer.tokenizer)
            writer = writer.in_chat(self.continue_final_message)
        elif self.continue_final_message:
            raise ConfigError(_NO_MESSAGES)
        else:
            writer = self._writer_of(writer, gaps=not isinstance(first, str))
        sampling = self.model_dump(mode="json", include=set(SamplingConfig.model_fields))
        asked = {"from": of, "chat": writer.chat is not None, **self.model_dump(include={"dtype", "cache", "merge"}), **sampling}
        asked |= {"continue_final_message": True} if self.continue_final_message else {}
        began = time.monotonic()

        def told(done: int, n_tokens: int) -> None:
            elapsed = time.monotonic() - began
            if due(elapsed):
                speed = n_tokens / elapsed
                status(f"{done:,} of {counted(len(prompts), 'prompt')} answered, {speed:,.0f} tokens/s")

        try:
            with quiet():
                n, n_tokens = answer_all(writer, prompts, out, asked, told, self.overwrite)
        except KeyboardInterrupt:
            note(f"{self.out}: what is answered is kept, and the same command goes on behind it.")
            raise
        speed = n_tokens / (time.monotonic() - began)
        note(f"{self.out}: {counted(len(prompts), 'prompt')} answered, {n:,} now, {n_tokens:,} tokens, {speed:,.0f} tokens/s.")

    def _writer_of(self, writer: "Writer", gaps: bool) -> "Writer":
        """Returns a writer of texts, of what fills gaps in them, or of answers to them. Raises ConfigError where it can write none."""
        if gaps and self.chat:
            raise ConfigError("suffix: a chat has none. Leave out chat=true, or the suffix.")
        if gaps:
            return writer.in_gaps()
        if self.chat is None and writer.tokenizer.chat_template is not None:
            note("prompt: continued as it stands. chat=true asks it as a user's message, in the model's chat template.")
        return writer.in_chat() if self.chat else writer

    def _require_template(self, tokenizer: "Tokenizer") -> None:
        if self.chat is False:
            raise ConfigError("chat=false: messages are asked in a chat template. Leave it out, or write prompts.")
        if tokenizer.chat_template is None:
            raise ConfigError("messages: the model's tokenizer has no chat template. Write prompts, or use a model fine-tuned on chats.")

    def _complete(self, writer: "Writer") -> None:
        from lm.data.tokenizer.gap import Gap

        prompts = [_standard_input()] if self.prompt is None else [self.prompt] if isinstance(self.prompt, str) else self.prompt
        writer = self._writer_of(writer, gaps=self.suffix is not None)
        encoded = [writer.ids(prompt if self.suffix is None else Gap(prompt, self.suffix)) for prompt in prompts]
        writer.rows(encoded)  # raises for too long a prompt, say, before anything is printed
        self._note_blanks(prompts, writer.tokenizer)
        answers = writer.answers
        behind = self.suffix or ""
        if len(prompts) * self.n == 1 and self.beams == 1 and self.format == "text":
            raw("" if answers else prompts[0])
            with quiet():
                found = writer.continued(encoded, lambda row, piece: raw(piece))
            raw(f"{behind}\n")
            self._note_completions(found, writer)
            return
        each: dict[int, list[Completion]] = {}  # of each prompt; fewer than n where beams find fewer texts of a grammar
        writer.continued(encoded, on_done=each.__setitem__)
        pairs = [(prompt, one) for i, prompt in enumerate(prompts) for one in each[i]]
        if self.format == "json":
            given = {} if self.suffix is None else {"suffix": self.suffix}
            answer(json.dumps([{"prompt": prompt, **given, **asdict(one)} for prompt, one in pairs]))
            return
        for number, (prompt, one) in enumerate(pairs, 1):
            raw(f"--- {number} of {len(pairs)} ---\n" if len(pairs) > 1 else "")
            raw(f"{'' if answers else prompt}{one.text}{behind}\n")
        self._note_completions([one for _, one in pairs], writer)

    def _note_completions(self, found: "Sequence[Completion]", writer: "Writer") -> None:
        """Prints notes on texts: what is told of their tokens, and where the context has limited them."""
        for number, completion in enumerate(found, 1):
            for each in completion.logprobs:
                told = [(each.token, each.logprob), *each.top]
                note("  ".join(f"{logprob:.4f} {writer.tokenizer.decode([token])!r}" for token, logprob in told))
            which = f"{'prompt' if self.n == 1 else 'text'} {number}: " if len(found) > 1 else ""
            self._note_limits(completion, writer.model.max_seq_len, which)

    def _converse(self, writer: "Writer") -> None:
        from lm.generation.conversation import Conversation

        if self.n > 1 or self.logprobs is not None or self.format != "text":
            raise ConfigError("n, logprobs, format: a conversation tells one answer as text. Leave them out, or give prompt=TEXT.")
        conversation = Conversation(writer.in_chat())
        for line in _typed() if sys.stdin.isatty() else _piped():
            if line.strip() == "/exit":
                return
            if line.strip() == "/reset":
                conversation.reset()
                note("what was said is forgotten.")
            elif line.strip():
                try:
                    found = conversation.answer(line, raw)
                except ConfigError as error:
                    note(str(error))
                    continue
                raw("\n")
                self._note_limits(found, writer.model.max_seq_len)

    def _note_blanks(self, prompts: Sequence[str], tokenizer: "Tokenizer") -> None:
        """Prints notes on prompts that end in a space, which is probably not meant."""
        for prompt in prompts:
            ids = tokenizer.encode(prompt)
            if not self.chat and prompt.endswith(" ") and prompt.strip() and tokenizer.encode(f"{prompt}a")[: len(ids)] != ids:
                note(f"prompt: {prompt[-20:]!r} ends in a space, which belongs to the next token in what the model has read. Leave it out.")

    def _note_limits(self, found: "Completion", context: int, which: str = "") -> None:
        if found.slid:
            note(f"{which}went on beyond the context of {context}: each token has seen no more than {context} up to itself.")
        if found.cut_short:
            why = f"{which}stopped after {counted(found.n_tokens, 'token')}, since the context of {context} is full"
            note(f"{why} (max_tokens={self.max_tokens}).")


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ConfigError(f"prompt: none was given, and standard input is no file or pipe. {_REMEDY}.")
    text = _decoded(sys.stdin.buffer.read(), "standard input")
    return text.removesuffix("\n").removesuffix("\r")  # the line break that echo adds


def _typed() -> Iterator[str]:
    """Yields lines typed in the terminal, with readline's editing where it is available."""
    with suppress(ImportError):
        import readline  # noqa: F401
    note("A conversation: /reset forgets it, /exit or Ctrl-D ends it.")
    while True:
        try:
            yield input("> ")
        except EOFError:
            raw("\n")
            return
        except UnicodeDecodeError as error:
            note(f"standard input: byte {error.start} of the line is not UTF-8. Type it again.")


def _piped() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        yield _decoded(line, f"standard input, line {number}").rstrip("\r\n")


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: byte {error.start} is not UTF-8, and a prompt must be. Convert it.") from None
