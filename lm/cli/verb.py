"""The base classes of the command line's verbs: a verb has keys of its own, a usage and `run`. Each file of `verbs/` has one."""

import os
import shlex
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from lm.cli.compose.arguments import refuse_spaced, take
from lm.cli.views.help import listing, usage
from lm.errors import ConfigError
from lm.generation.config import CacheForm, Dtype
from lm.printing import due, note, status
from lm.schema import Config, MaybeEmpty, Tree
from lm.spelling import did_you_mean
from lm.storage.model_folder import folder_hash, resolve_model
from lm.units import counted

if TYPE_CHECKING:
    from lm.data.tokenizer.tokenizer import Tokenizer
    from lm.generation.whole import Whole
    from lm.nn.transformer import LM

T = TypeVar("T")


class Verb(Config):
    """Base of the verbs. A field is a key of the verb's own, `from_` the key `from`; the docstring is its usage."""

    words: ClassVar[tuple[str, ...] | None] = ()
    """What may stand behind it beside keys; None: anything."""
    takes: ClassVar[tuple[str, ...] | None] = ()
    """Sections of the overrides of `lm train` that it takes; None: all."""

    @abstractmethod
    def run(self, rest: list[str]) -> None:
        """Runs the verb. Raises LmError.  rest: the other arguments, which most verbs take as overrides of `lm train`."""

    @classmethod
    def help_text(cls, rest: list[str]) -> str:
        """Returns the output of `lm VERB --help`."""
        return f"{usage(cls)}\n\n{listing(cls)}".rstrip()

    def refuse(self, rest: Sequence[str]) -> None:
        """Raises ConfigError for what is left of the arguments once the verb's own keys are taken."""
        keys = [name.rstrip("_") for name in type(self).model_fields]
        for arg in rest:
            key, equals, _ = arg.partition("=")
            if not equals:
                raise ConfigError(f"{arg}: this is not of the form key=value. {did_you_mean(arg, keys)}")
            if key != "traceback":
                raise ConfigError(f"{key}: there is no such key. {did_you_mean(key, keys, self.other_names)}")

    def folders(self, rest: Sequence[str]) -> list[str]:
        """Returns the arguments that are folders: those that exist or have no '='. Raises ConfigError for others, and for an empty one."""
        found = [arg for arg in rest if Path(arg).exists() or "=" not in arg]
        self.refuse([arg for arg in rest if arg not in found])
        if not all(arg.strip() for arg in found):
            raise ConfigError(f"{type(self).__name__.lower()}: '' was given for a folder, as an unset variable leaves it. Name one.")
        return found


class Writing(Verb):
    """Base of the verbs that write a folder."""

    out: str
    """Folder to write."""
    overwrite: bool = False
    """Replace a folder that a verb has written before, once the new one is complete."""

    def tried(self, options: Sequence[str] = (), embeds: bool = False) -> str:
        """Returns the command that tries the written model; an encoder, a classifier and a model that reads the mean of a text continue no
        prompt.

        options: of lm generate.  embeds: it was written without a head.
        """
        from lm.storage.model_folder import read_config
        from lm.storage.reading import read_json

        out = Path(os.path.expanduser(self.out))
        model, tokenizer = read_config(out).get("model", {}), out / "tokenizer_config.json"
        head = model.get("head", {})
        if head.get("labels"):
            verb, what = "classify", "text=..."
        elif embeds or head.get("pooling") == "mean":
            verb, what = "embed", "text=[TEXT,ANOTHER]"
        elif model.get("kind") != "encoder":
            verb, what = "generate", " ".join(["prompt=...", *map(shlex.quote, options)])
        elif tokenizer.is_file() and (mask := read_json(tokenizer).get("mask_token")):
            verb, what = "fill", f"text={shlex.quote(f'A {mask} text.')}"
        else:
            verb, what = "eval", "data=text data.files=..."
        return f"Try it: lm {verb} from={shlex.quote(self.out)} {what}"


class Decoding(Verb):
    """Base of the verbs that decode with a model."""

    other_names = {
        "cache": "cache_implementation kv_cache_dtype",
        "dtype": "load_in_4bit load_in_8bit precision quantization quantize torch_dtype",
        "from": "base_model checkpoint ckpt folder model model_name model_path pretrained run",
    }

    from_: str
    """Run, model or checkpoint folder."""
    device: str = "auto"
    """auto (CUDA where there is a GPU), cpu, cuda, cuda:N or mps (the GPU of a Mac)."""
    dtype: Dtype | None = "saved"
    """Of the matrices: saved (as in the folder), fp32, bf16, fp16, int8 (a scale an output) or int4 (a scale and a zero for 32 inputs).
    null: the model as it was trained, with nothing fused."""
    compile: bool = False
    """A step of one row is compiled first, which takes seconds and a C++ compiler (on CUDA Triton), and is faster then; in fewer bits
    than float32 it rounds otherwise than a step of several rows. On CUDA a step of all rows is recorded as one graph, too."""
    cache: CacheForm | None = None
    """Of the keys and values of each token: bf16, or int8 (a scale for each head of a token). null: as they are computed."""


class OfTexts(Verb):
    """Base of the verbs that read whole texts, which are given as they are or in a file."""

    done: ClassVar[str]
    """What they have done to a text."""

    from_: str
    """Run, model or checkpoint folder."""
    text: MaybeEmpty | list[MaybeEmpty] | None = None
    """A text; may be given several times."""
    texts: str | None = None
    """File of JSON lines, each with a text, or .txt of plain ones."""
    field: str | None = None
    """With texts: the field of the text; a dot leads into an object: meta.text. null: text."""
    out: str | None = None
    """With texts: the file to write, which is there when it is complete."""
    overwrite: bool = False
    """With out: replace a file, and what a start that asked otherwise has left of it."""
    merge: bool = True
    """An adapter becomes part of the weights; otherwise it computes beside them."""
    device: str = "auto"
    """auto (CUDA where there is a GPU), cpu, cuda, cuda:N or mps (the GPU of a Mac)."""
    dtype: Dtype | None = None
    """As lm generate holds the matrices: saved, fp32, bf16, fp16, int8 or int4. null: as they were saved."""
    format: Literal["text", "json"] = "text"
    """json: a list with an object of each text."""

    def run(self, rest: list[str]) -> None:
        """Prints what the model makes of the texts on stdout, notes on stderr; of a file of texts it writes it into another file."""
        self.refuse(rest)
        files = self.files()
        folder = resolve_model(self.from_)
        if files is not None:
            self.write_file(folder, files)
        else:
            self.show(folder, [self.text] if isinstance(self.text, str) else self.text or [])

    @abstractmethod
    def show(self, folder: Path, texts: list[str]) -> None:
        """Prints what the model in this folder makes of the texts."""

    @abstractmethod
    def write_file(self, folder: Path, files: tuple[Path, Path]) -> None:
        """Writes what it makes of a file of texts.  files: of texts, and the one to write."""

    def load(self, folder: Path) -> "tuple[LM, Tokenizer]":
        """Returns the model and the tokenizer."""
        from lm.generation.load import load

        return load(folder, self.device, self.merge, self.dtype)

    def files(self) -> tuple[Path, Path] | None:
        """Returns the file of texts and the one to write; None where texts are given as they are. Raises ConfigError where it is neither,
        or both, and for a field of no file."""
        if (self.text is None) == (self.texts is None):
            raise ConfigError("text: give text=TEXT, or texts=FILE and out=FILE.")
        if (self.texts is None) != (self.out is None) or (self.texts is not None and self.format != "text"):
            raise ConfigError("texts, out, format: a file of texts needs out=FILE, and has a format of its own. Write texts=FILE out=FILE.")
        if self.texts is None and self.field is not None:
            raise ConfigError("field: it is of texts=FILE, which is not set. Set it, or leave it out.")
        if self.texts is None or self.out is None:
            return None
        return Path(os.path.expanduser(self.texts)), Path(os.path.expanduser(self.out))

    def read_lines(self, files: tuple[Path, Path], asked: Callable[[object, str], T], adds: str | None) -> tuple[list[Tree], list[T]]:
        """Returns the lines of the file of texts, and what is asked of each.

        asked: returns it of a line and its place.  adds: the field that each line gets.  Raises ConfigError for a file of no texts, and
        where there is something at `out`.
        """
        from lm.generation.lines import require_lines, require_new
        from lm.generation.whole import read_texts_file

        if adds is None:
            require_new(files[1], self.overwrite)
        else:
            require_lines(files[1], self.overwrite, read=files[0])
        lines, found = [], []
        for line, where in read_texts_file(files[0]):
            found.append(asked(line, where))
            if adds is not None and adds in line:
                raise ConfigError(f"{where}: it has the field {adds} already, which is written here. Rename it.")
            lines.append(line)
        if not lines:
            raise ConfigError(f'{files[0]}: it holds no text. Write a line such as {{"text": "a text"}} for each.')
        return lines, found

    def text_of(self, line: object, where: str) -> str:
        """Returns the text of a line of a file. Raises ConfigError where it has none."""
        from lm.generation.whole import require_texts, values_of

        names = [self.field or "text"]
        return require_texts(values_of(line, names, where), names, where, line)[0]

    def write_lines(self, out: Path, lines: list[Tree], fields: Sequence[str | None], of: "Whole[T]") -> None:
        """Writes each line with what the model makes of its text; a start that was ended is gone on with.  fields: of the texts."""
        self.note_cut(of)
        asked = {"from": folder_hash(resolve_model(self.from_)), **self.model_dump(include={"dtype", "merge"}), "fields": [*fields]}
        try:
            n = of.into(out, lines, asked, self.telling(len(lines)), self.overwrite)
        except KeyboardInterrupt:
            note(f"{self.out}: what is {self.done} is kept, and the same command goes on behind it.")
            raise
        note(f"{self.out}: {counted(len(lines), 'text')} {self.done}, {n:,} now.")

    def note_cut(self, of: "Whole[T]") -> None:
        """Notes how many texts are longer than what the model reads."""
        if of.n_cut:
            note(f"texts: {of.n_cut:,} of {of.n:,} {'is' if of.n_cut == 1 else 'are'} longer than the model reads: the end is left out")

    def telling(self, n: int) -> Callable[[int], None]:
        """Returns what is to be called with how many of n texts are done so far, and tells it now and then."""
        began = time.monotonic()

        def told(so_far: int) -> None:
            if due(time.monotonic() - began):
                status(f"{so_far:,} of {counted(n, 'text')} {self.done}")

        return told


def find(name: str) -> type[Verb]:
    """Returns the class `Name` of verbs/name.py; a module named like a keyword of Python has an underscore."""
    found: type[Verb] = getattr(import_module(f"lm.cli.verbs.{name}{'_' * iskeyword(name)}"), name.capitalize())
    return found


def call(verb: type[Verb], args: Sequence[str]) -> None:
    """Runs a verb with these arguments."""
    if verb.words is not None:
        refuse_spaced(args, verb.words)
    own, rest = take(verb, args)
    own.run(rest)
