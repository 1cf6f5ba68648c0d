"""The configs of variants of one setting, composed side by side."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from lm import plugins
from lm.cli.compose.compose import Composition, compose
from lm.errors import CheckpointError, ConfigError
from lm.printing import note

if TYPE_CHECKING:
    from lm.training.config import TrainConfig

T = TypeVar("T")
Variants = Mapping[str, Sequence[str]]
"""Overrides of each variant by its name."""


def check(where: str, shared: Sequence[str], variants: Variants) -> None:
    """Raises ConfigError for mistyped keys and values, before anything heavy is imported.  where: as in `composed`."""
    for name, own in variants.items():
        _of(where, name, [*shared, *own], bool(own), Composition.full)


def composed(where: str, shared: Sequence[str], variants: Variants) -> "dict[str, TrainConfig]":
    """Returns the config of each variant; a note that several of them have is told once.

    where: what a variant's name follows in an error, which says whose it is unless the variant has no overrides of its own.
    """
    notes: dict[str, None] = {}

    def config(composition: Composition) -> "TrainConfig":
        found = composition.config()
        notes.update(dict.fromkeys(composition.notes))
        return found

    configs = {name: _of(where, name, [*shared, *own], bool(own), config) for name, own in variants.items()}
    for line in notes:
        note(line)
    return configs


def _of(where: str, name: str, overrides: Sequence[str], own: bool, ask: Callable[[Composition], T]) -> T:
    try:
        return ask(compose(plugins.take(overrides)))
    except (ConfigError, CheckpointError) as error:
        raise type(error)(f"{where}{name}: {error.sentence}" if own else error.sentence, error.before) from None
