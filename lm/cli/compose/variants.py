"""The configs of variants of one setting, composed side by side."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lm.cli.compose.compose import compose
from lm.errors import CheckpointError, ConfigError
from lm.printing import note

if TYPE_CHECKING:
    from lm.training.config import TrainConfig

Variants = Mapping[str, Sequence[str]]
"""Overrides of each variant by its name."""


def check(where: str, shared: Sequence[str], variants: Variants) -> None:
    """Raises ConfigError for mistyped keys and values, before anything heavy is imported.  where: as in `composed`."""
    for name, own in variants.items():
        with _errors_begin(f"{where}{name}: " if own else ""):
            compose([*shared, *own]).full()


def composed(where: str, shared: Sequence[str], variants: Variants) -> "dict[str, TrainConfig]":
    """Returns the config of each variant; a note that several of them have is told once.

    where: what a variant's name follows in an error, which says whose it is unless the variant has no overrides of its own.
    """
    configs: dict[str, TrainConfig] = {}
    notes: dict[str, None] = {}
    for name, own in variants.items():
        with _errors_begin(f"{where}{name}: " if own else ""):
            composition = compose([*shared, *own])
            configs[name] = composition.config()
            notes |= dict.fromkeys(composition.notes)
    for line in notes:
        note(line)
    return configs


@contextmanager
def _errors_begin(with_: str) -> Iterator[None]:
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        raise type(error)(f"{with_}{error.sentence}", error.before) from None
