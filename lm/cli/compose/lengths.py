"""Lengths that are not spelled in steps, such as `trainer.max_steps=3epochs`, counted in steps where a config is made."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any, cast

from lm.cli.compose.keys import at
from lm.errors import ConfigError
from lm.schema import Tree
from lm.units import counted

if TYPE_CHECKING:
    from lm.training.config import TrainConfig

WHOLE, WARMUP, KEPT = "trainer.max_steps", "schedule.warmup_steps", "checkpoint.keep_steps"
_KEYS = (WHOLE, WARMUP, "trainer.val_every", "trainer.log_every", "checkpoint.every")
_LISTS = {KEPT: None, "data.phases": "until_step"}
"""Lists of lengths, or of parts that have one by this key."""
_SIZES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_SPELLED = re.compile(rf"(\d+(?:\.\d+)?(?:e\d\d?)?) ?(?:(%)|([{''.join(_SIZES)}]?) ?(?:(token)|(row))s?|epochs?)")


@dataclass(frozen=True)
class Length:
    """A number of epochs, rows, tokens or hundredths of the run."""

    text: str  # as it was given
    number: Fraction
    unit: str  # epochs, rows, tokens or %


def spelled(tree: Tree) -> dict[str, Length]:
    """Returns the lengths that are texts, by dotted key, the whole run's first. Raises ConfigError for one that cannot be read."""
    return {key: _read(key, value) for key, value in _places(tree) if isinstance(value, str)}


def beginning(tree: Tree) -> dict[str, Any]:
    """Returns values for the keys of these lengths with which a config is valid before they are counted."""
    keys = spelled(tree)
    lists = {key.partition("[")[0] for key in keys if "[" in key}
    rising = {key: i for i, (key, _) in enumerate(_places(tree), 1 - len(_KEYS)) if key.partition("[")[0] in lists}
    return placed(tree, {key: {WHOLE: 1 << 40, WARMUP: 0}.get(key, 1) for key in keys} | rising)


def placed(tree: Tree, steps: dict[str, int]) -> dict[str, Any]:
    """Returns these steps as values of a layer, in which those of a list's entries stand in the list."""
    found: dict[str, Any] = {key: n for key, n in steps.items() if key in _KEYS}
    for name, part in _LISTS.items():
        own = {int(key.partition("[")[2].partition("]")[0]): n for key, n in steps.items() if key.startswith(f"{name}[")}
        if own:
            entries = cast("list[Any]", at(tree, name.split(".")))
            found[name] = [entry if i not in own else own[i] if part is None else entry | {part: own[i]} for i, entry in enumerate(entries)]
    return found


def _places(tree: Tree) -> Iterator[tuple[str, object]]:
    """Yields key and value of all that may be lengths; of an entry of a list the key is as data.phases[0].until_step."""
    for key in _KEYS:
        yield key, at(tree, key.split("."))
    for name, part in _LISTS.items():
        entries = at(tree, name.split("."))
        for i, entry in enumerate(entries if isinstance(entries, list) else []):
            if part is None:
                yield f"{name}[{i}]", entry
            elif isinstance(entry, dict):
                yield f"{name}[{i}].{part}", entry.get(part)


def in_steps(cfg: "TrainConfig", lengths: dict[str, Length]) -> tuple[dict[str, int], list[str]]:
    """Returns the lengths in steps, rounded up, by key, and lines that tell how they were counted. Epochs are counted in the rows of the
    data, which are prepared for that. Raises ConfigError for a share of a run that the clock ends, and what the data raise."""
    n_rows = 0
    notes: list[str] = []
    steps: dict[str, int] = {}
    if any(each.unit == "epochs" for each in lengths.values()):
        from lm.training.epochs import counted_rows

        n_rows = counted_rows(cfg)
    rows_of = {
        "epochs": Fraction(n_rows * cfg.objective.updates_of_rows()),
        "tokens": Fraction(cfg.objective.parts_of_rows(), cfg.objective.texts * cfg.data.seq_len),
        "rows": Fraction(1),
    }
    for key, each in lengths.items():
        if each.unit == "%":
            if cfg.trainer.max_minutes is not None:
                raise ConfigError(f"{key}: {each.text} is a share of a length that trainer.max_minutes leaves to the clock. Give steps.")
            steps[key] = ceil(each.number / 100 * steps.get(WHOLE, cfg.trainer.max_steps))
        else:
            steps[key] = cfg.data.sizes.until(each.number * rows_of[each.unit])
        whole = {"epochs": f" of {counted(n_rows, 'row')}", "%": " of the run"}.get(each.unit, "")
        notes.append(f"{key}={steps[key]}: {each.text}{whole}")
    return steps, notes


def _read(key: str, text: str) -> Length:
    if (match := _SPELLED.fullmatch(text.strip())) is None or (key == WHOLE and match[2]):
        share = "" if key == WHOLE else ", or a share of the run such as 3%"
        raise ConfigError(f"{key}: {text!r} does not fit. Give steps such as 300, or 3epochs, 10Mtokens, 80krows{share}.")
    number, percent, size, tokens, rows = match.groups()
    if percent and Fraction(number) > 100:
        raise ConfigError(f"{key}: {text!r} is more than the whole run. Give 100% or less.")
    unit = "%" if percent else "tokens" if tokens else "rows" if rows else "epochs"
    return Length(text.strip(), Fraction(number) * _SIZES[size or ""], unit)
