"""What the verbs that prepare and look at data take: the overrides of `lm train`, of which they read the data's part."""

import sys
from collections.abc import Sequence

from lm.cli.compose.compose import compose
from lm.cli.verbs.train import parse_call
from lm.config import Config
from lm.data.kinds import DataConfig, ObjectiveConfig, TokenizerConfig
from lm.errors import ConfigError


class Corpus(Config):
    """The parts of a training run that decide its rows."""

    data: DataConfig
    tokenizer: TokenizerConfig
    objective: ObjectiveConfig


def take_corpus(verb: str, overrides: Sequence[str]) -> Corpus:
    """Composed as `lm train` would. Raises ConfigError."""
    call = parse_call(overrides)
    if call.multirun or call.show_config:
        raise ConfigError(f"{verb}: -m and --cfg belong to lm train. Leave them out.")
    composition = compose(call.overrides)
    found = composition.checked(Corpus, {key: composition.tree[key] for key in Corpus.model_fields})
    for note in composition.notes:
        print(note, file=sys.stderr)
    return found


def take(args: Sequence[str], key: str) -> tuple[str | None, list[str]]:
    """The value of key=value, and the other arguments. Raises ConfigError where it is given twice."""
    given = [arg.removeprefix(f"{key}=") for arg in args if arg.startswith(f"{key}=")]
    if len(given) > 1:
        raise ConfigError(f"{key}: it was given {len(given)} times ({', '.join(given)}). Give it once.")
    return (given[0] if given else None), [arg for arg in args if not arg.startswith(f"{key}=")]


def say(line: str) -> None:
    """Progress goes to stderr."""
    print(line, file=sys.stderr, flush=True)
