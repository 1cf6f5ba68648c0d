"""The base classes of the command line's verbs: a verb has keys of its own, a usage and `run`. Each file of `verbs/` has one."""

import shlex
from abc import abstractmethod
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import ClassVar

from lm.cli.compose.arguments import refuse_spaced, take
from lm.cli.views.help import listing, usage
from lm.errors import ConfigError
from lm.generation.config import CacheForm, Dtype
from lm.schema import Config, did_you_mean


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
                raise ConfigError(f"{key}: there is no such key. {did_you_mean(key, keys)}")

    def folders(self, rest: Sequence[str]) -> list[str]:
        """Returns the arguments that are folders: those that exist or have no '='. Raises ConfigError for others, and for an empty one."""
        found = [arg for arg in rest if Path(arg).exists() or "=" not in arg]
        self.refuse([arg for arg in rest if arg not in found])
        if not all(arg.strip() for arg in found):
            raise ConfigError(f"{type(self).__name__.lower()}: '' was given for a folder, as an unset variable leaves it. Name one.")
        return found


class Writer(Verb):
    """Base of the verbs that write a folder."""

    out: str
    """Folder to write."""
    overwrite: bool = False
    """Replace a folder that a verb has written before, once the new one is complete."""

    def tried(self, options: Sequence[str] = ()) -> str:
        """Returns the command that tries the written model; an encoder and a classifier continue no prompt.  options: of lm generate."""
        from lm.storage.model_folder import read_config

        model, prompt = read_config(Path(self.out).expanduser()).get("model", {}), ["prompt=...", *map(shlex.quote, options)]
        verb, what = ("eval", "data=text data.files=...") if model.get("kind") == "encoder" else ("generate", " ".join(prompt))
        verb, what = ("classify", "text=...") if model.get("head", {}).get("labels") else (verb, what)
        return f"Try it: lm {verb} from={shlex.quote(self.out)} {what}"


class Decoding(Verb):
    """Base of the verbs that decode with a model."""

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
