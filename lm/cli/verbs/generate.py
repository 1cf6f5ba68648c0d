"""`lm generate from=FOLDER prompt=TEXT`: continues text, or answers it."""

import sys

from lm.cli.verb import Verb
from lm.errors import ConfigError
from lm.generation.sampling import SamplingConfig
from lm.printing import note, raw
from lm.schema import MaybeEmpty


class Generate(Verb, SamplingConfig):
    """usage: lm generate from=FOLDER [prompt=TEXT ...] [key=value ...]

    Without a prompt, standard input is the prompt. One prompt is continued as you watch; several are decoded together, each with the
    result that it has alone. To an encoder-decoder the prompt is the source, with chat=true it is a user's message to a
    model fine-tuned on chats, and the answer alone is printed. Values are taken literally: a prompt or a stop text may hold '=', quotes,
    commas and line breaks.
    """

    from_: str
    """Run, model or checkpoint folder."""
    prompt: MaybeEmpty | list[MaybeEmpty] | None = None
    """Text to continue, or the source of an encoder-decoder; may be given several times. Empty: a new document. null: standard input."""
    chat: bool = False
    """The prompt is a user's message under the tokenizer's chat template."""
    device: str = "auto"
    """auto (CUDA where there is a GPU), cpu, cuda or cuda:N."""

    def run(self, rest: list[str]) -> None:
        """Prints text on stdout, notes on stderr."""
        self.refuse(rest)
        prompts = self._prompts()
        from lm.generation.decode import room
        from lm.generation.load import load
        from lm.generation.text import chat_template, complete, prompt_ids

        model, tokenizer = load(self.from_, self.device)
        answers = self.chat or model.cfg.kind == "encoder_decoder"
        chat = chat_template(tokenizer) if self.chat else None
        for prompt in prompts:
            room(model, prompt_ids(model, tokenizer, prompt, chat), self)  # what does not fit is refused before anything is printed
        shown = [""] * len(prompts) if answers else prompts
        if len(prompts) == 1:
            raw(shown[0])
            found = complete(model, tokenizer, prompts, self, lambda row, piece: raw(piece), chat)
            raw("\n")
        else:
            found = complete(model, tokenizer, prompts, self, chat=chat)
            for n, (prompt, completion) in enumerate(zip(shown, found, strict=True), 1):
                raw(f"--- {n} of {len(prompts)} ---\n{prompt}{completion.text}\n")
        for n, completion in enumerate(found, 1):
            which = f"prompt {n}: " if len(prompts) > 1 else ""
            if completion.slid:
                context = model.max_seq_len
                note(f"{which}went on beyond the context of {context}: each token has seen no more than {context} up to itself.")
            if completion.cut_short:
                why = f"{which}stopped after {completion.n_tokens} tokens, since the context of {model.max_seq_len} is full"
                note(f"{why} (max_tokens={self.max_tokens}).")

    def _prompts(self) -> list[str]:
        if self.prompt is not None:
            return [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
            remedy = "Write prompt=TEXT, or echo TEXT | lm generate ..."
            raise ConfigError(f"prompt: none was given, and standard input is no file or pipe. {remedy}")
        data = sys.stdin.buffer.read()
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input: byte {error.start} is not UTF-8, and a prompt must be. Convert it.") from None
        return [text.removesuffix("\n").removesuffix("\r")]  # the line end that echo adds
