"""Parses `key=value` of the command line, in Hydra's grammar: group options, values, deletions and sweeps."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any, NoReturn

from hydra.core.override_parser.types import Glob, Override, Transformer

from lm.cli.compose import catalog
from lm.cli.compose.quoting import alternatives, hydra, in_shell, quoted, readable
from lm.cli.listing import known
from lm.cli.listing.nearest import meant, of_hydra
from lm.errors import ConfigError
from lm.schema import flatten
from lm.spelling import did_you_mean

_OF_PATHS = {"data": "data=text data.files={}", "tokenizer": "tokenizer=file tokenizer.path={}", "model": "init_from={}"}
"""Group -> the overrides that take a file or folder of its sort."""
_MOST_JOBS = 10_000


@dataclass(frozen=True)
class Given:
    """A parsed override. `key` is a group ('model/ffn') or a dotted path."""

    text: str
    key: str
    value: Any
    is_group: bool = False
    is_delete: bool = False

    @property
    def raw(self) -> str:
        """The value as typed."""
        return self.text.partition("=")[2]


def parse(texts: Sequence[str]) -> list[Given]:
    """Returns the parsed overrides, checked for grammar, group and option; keys need the tree. Raises ConfigError."""
    return [_given(each) for text in texts for each in _several(text)]


def _several(text: str) -> list[str]:
    """Returns an override such as `logger=[a,b]` as several: the option `several`, and each member under its name; others as they are."""
    key, _, value = text.partition("=")
    if "several" not in catalog.groups().get(key, ()) or not (value.startswith("[") and value.endswith("]")):
        return [text]
    names = [name.strip() for name in value[1:-1].split(",")]
    options = [option for option in catalog.groups()[key] if option != "several"]
    for number, name in enumerate(names):
        if name not in options:
            raise ConfigError(f"{key}: {name!r} is not an option. {did_you_mean(name, options)}")
        if name in names[:number]:
            raise ConfigError(f"{key}: {name} is named twice, and once is enough. Leave one out.")
    leaves = {
        f"{key}.each.{name}{path.removeprefix(key)}": found for name in names for path, found in catalog.with_inherited(key, name).items()
    }
    return [f"{key}=several", *(f"{path}={found}" for path, found in leaves.items())]


def expand(texts: Sequence[str]) -> list[list[str]]:
    """Returns the jobs of a sweep: every combination of values, the last override varying fastest. Raises ConfigError."""
    each = [_alternatives(text) for text in texts]
    if prod(map(len, each)) > _MOST_JOBS:
        longest = max(zip(map(len, each), texts, strict=True))[1]
        raise ConfigError(f"-m: a sweep has at most {_MOST_JOBS:,} jobs, and these are more. Give {longest} fewer values.")
    return [list(job) for job in product(*each)]


def _alternatives(text: str) -> list[str]:
    key, _, value = text.partition("=")
    listed = alternatives(value)
    if listed != [value]:
        return [f"{key}={each}" for each in listed]
    override = _read(text)
    if not override.is_sweep_override():
        return [text]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{text}: an interval cannot be enumerated. Use range(start,stop,step) or a list of values.")
    sweep: Any = override.value()
    if isinstance(sweep, Glob):
        options = catalog.groups().get(override.key_or_group, [])
        found: list[Any] = sweep.filter(options)
        if not found:
            raise ConfigError(f"{text}: no option matches. {did_you_mean('', options)}")
    else:
        try:
            found = list(islice(override.sweep_iterator(transformer=Transformer.encode), _MOST_JOBS + 1))
        except (ValueError, ArithmeticError) as error:  # such as a step of 0
            raise ConfigError(f"{text}: it has no values ({error}). Use range(start,stop,step) or a list of values.") from None
    return [f"{key}={value}" for value in found]


def _read(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        raise ConfigError(f"{text}: this is not of the form key=value. {catalog.as_own(text) or 'Write one, or see lm train --help.'}")
    if equals and not value.strip() and not text.startswith("~"):
        raise ConfigError(f"{text}: no value was given behind '='. Write one, or leave {key} out.")
    found = hydra(text) or hydra(f"{key}={readable(value)}")
    if found is None:
        sections = known.root().model_fields.keys() | catalog.groups().keys()
        if key.lstrip("+") in sections:
            raise ConfigError(f"{text}: this is no value. Write each key for itself, as in {key}.x=VALUE.")
        raise ConfigError(f"{key}: there is no such key. {did_you_mean(re.split('[.=]', key.lstrip('~+'))[0], sections)}")
    return found


def _given(text: str) -> Given:
    override = _read(text)
    key, groups = override.key_or_group, catalog.groups()
    if override.package is not None:
        raise ConfigError(f"{text}: a group has one place here. Leave @{override.package} out.")
    if (said := of_hydra(key)) is not None:
        raise ConfigError(said)
    raw = text.partition("=")[2]
    if override.is_sweep_override() or alternatives(raw) != [raw]:
        _refuse_sweep(text, key, raw)
    options = [*groups.get(key, ()), *["null"] * (key in catalog.optional())]
    if override.is_delete():
        if key in groups:
            raise ConfigError(f"{text}: a group cannot be removed. Choose an option: {', '.join(options)}.")
        return Given(text, key, None, is_delete=True)
    value = override.value()
    if key not in groups:
        _require_no_group(key, raw)
        return Given(text, key, value)
    if value is None and "null" in options:
        return Given(text, key, None, is_group=True)
    if isinstance(value, dict):
        each = " ".join(f"{path}={one}" for path, one in flatten(value, f"{key.replace('/', '.')}.").items())
        raise ConfigError(f"{key}: a dict was given for an option. Write its keys one by one: {each or 'there are none'}.")
    option = value if isinstance(value, str) else override.get_value_element_as_str()
    if option not in groups[key]:
        _refuse_option(key, option, options)
    return Given(text, key, option, is_group=True)


def _refuse_sweep(text: str, key: str, raw: str) -> NoReturn:
    single = f"for a text {in_shell(f'{key}={quoted(raw)}')}"
    if re.fullmatch(r"-?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", raw):  # thousands apart
        single = f"for one number {key}={raw.replace(',', '')}, since commas part values"
    remedy = f"lm train runs them all with -m; write {key}=[...] for a list, or {single}"
    raise ConfigError(f"{text} is a sweep of several values. {remedy}.")


def _require_no_group(key: str, raw: str) -> None:
    """Raises ConfigError for a key that can only be meant as a group, or whose value can only be meant as an option."""
    groups = catalog.groups()
    if "/" in key:
        section, _, name = key.replace("/", ".").rpartition(".")
        by_others = [path.replace(".", "/") for path in meant(name, section, ())]
        near = next((f"Did you mean '{group}'?" for group in by_others if group in groups), None)
        raise ConfigError(f"{key}: there is no such group. {near or did_you_mean(key, groups)}")
    if key.isidentifier() and key not in known.root().model_fields and (remedy := catalog.as_own(raw)):
        raise ConfigError(f"{key}: there is no such key. {remedy}")


def _refuse_option(key: str, option: str, options: Sequence[str]) -> NoReturn:
    if key in _OF_PATHS and os.path.lexists(os.path.expanduser(option)):
        raise ConfigError(f"{key}: '{option}' is a path, not an option. Write {_OF_PATHS[key].format(in_shell(option))}.")
    if remedy := catalog.as_own(option, key):
        raise ConfigError(f"{key}: '{option}' is a file, not an option. {remedy}")
    own = "" if key in catalog.GLOBAL else " One of your own comes with plugins=FILE.py."
    raise ConfigError(f"{key}: '{option}' is not an option. {did_you_mean(option, options)}{own}")
