"""The parts of a training run that verbs other than `lm train` need, from the overrides of `lm train`."""

from collections.abc import Sequence
from typing import TypeVar

from lm.cli.compose.arguments import parse_call
from lm.cli.compose.compose import Composition, Layer, compose
from lm.cli.views.text import say
from lm.data.kinds import DataConfig, ObjectiveConfig, TokenizerConfig
from lm.errors import ConfigError
from lm.generation.examine import Examined
from lm.schema import Config, did_you_mean, flatten
from lm.storage.run_folder import RunFolder

P = TypeVar("P", bound=Config)
_EXAMINED = ("data", "objective", "recipes")


class Corpus(Config):
    """What decides the rows of a training run."""

    data: DataConfig
    tokenizer: TokenizerConfig
    objective: ObjectiveConfig


def take_corpus(verb: str, args: Sequence[str]) -> Corpus:
    """Composed as `lm train` would. Raises ConfigError."""
    return _section(compose(_overrides(verb, args)), Corpus)


def take_examined(args: Sequence[str], own_keys: Sequence[str], run: RunFolder | None) -> tuple[Examined, bool]:
    """What `lm eval` is told of data and objective, and whether that says how long rows are.

    run: what the model comes from; it speaks for data and objective where none are chosen. Raises ConfigError, and CheckpointError where
    the run's config does not fit.
    """
    overrides = _overrides("eval", args)
    for override in overrides:
        section = override.lstrip("~").split("=")[0].replace("/", ".").split(".")[0]
        if section not in _EXAMINED:
            hint = did_you_mean(section, [*own_keys, *_EXAMINED])
            raise ConfigError(f"{override.split('=')[0]}: lm eval has no such key. {hint}")
    if {override.split("=")[0] for override in overrides} & {"data", "recipes"}:
        saved = Layer("", "", {})
    elif run is not None:
        saved = Layer("run", str(run.config_file), flatten(Examined.of_run(run).tree()))
    else:
        remedy = "Write data=text data.files=FILE, or data=stdlib"
        raise ConfigError(f"data: the model is in no run folder, so the data must be given. {remedy}.")
    composition = compose(overrides, saved)
    says_length = [layer.label for layer, _ in composition.stated("data.seq_len")][-1:]
    return _section(composition, Examined), says_length in (["run"], ["command line"])


def _section(composition: Composition, cls: type[P]) -> P:
    tree = composition.tree
    found = composition.checked(cls, {key: tree[key] for key in cls.model_fields if key in tree})
    for note in composition.notes:
        say(note)
    return found


def _overrides(verb: str, args: Sequence[str]) -> list[str]:
    call = parse_call(args)
    if call.multirun or call.show_config:
        raise ConfigError(f"{verb}: -m and --cfg belong to lm train. Leave them out.")
    return call.overrides
