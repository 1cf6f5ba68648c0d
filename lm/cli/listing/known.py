"""The keys of `lm train` without importing the real config classes, which import torch: so mistyped keys are reported at once.

`keys.json` lists the fields of TrainConfig and of all configs that it may hold. The classes built from it reject the same values with the
same messages as the real ones' fields, and do nothing else. `make keys` writes it; it is ignored where the sources have changed since.
"""

import hashlib
import json
import re
import sys
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field, create_model

from lm import collector, plugins
from lm.errors import ConfigError
from lm.schema import Config, Named, Slot, Tree, entry_type, from_tree, members, variant

if TYPE_CHECKING:
    from lm.training.config import TrainConfig

FILE = Path(__file__).with_name("keys.json")
_LM = Path(__file__).parents[2]
_SOURCES = ("schema.py", "ops/**/*.py", "nn/**/*.py", "adapters/**/*.py", "data/**/*.py", "generation/config.py", "training/**/*.py")
_DECLARATION = re.compile(rb"^class \w+\((?!nn\.Module).*\n(?:(?: .*)?\n)*|^\w+ = .*\n", re.M)
_METHOD = re.compile(rb"^    def .*\n(?:(?:    [ )].*)?\n)*", re.M)
_LAZY: Any = {"defer_build": True, "use_attribute_docstrings": False, "validate_default": False}  # most of these classes are never used


def root() -> type[Config]:
    """Returns the class built from keys.json in place of TrainConfig, where the list is up to date and no plugin adds kinds; else
    TrainConfig, also where that is imported already."""
    if plugins.loaded() or "lm.training.config" in sys.modules or (listed := _listed()) is None:
        return real()
    return listed


def as_of_today(saved: Tree) -> Tree:
    """Returns a run's saved config with the defaults of keys that were added since, which stand for how runs were before; as it is where it
    is not valid today, or of a plugin that is not loaded."""
    try:
        return from_tree(root(), saved).tree()
    except ConfigError:
        return saved


@cache
def real() -> type["TrainConfig"]:
    """Returns TrainConfig, whose import brings torch. Cached, since each pause of the collector makes young objects count as old."""
    with collector.paused():
        from lm.training.config import TrainConfig
    return TrainConfig


def sources(folder: Path = _LM) -> list[Path]:
    """Returns the files that may declare config classes."""
    return sorted(path for pattern in _SOURCES for path in folder.glob(pattern))


def declared(folder: Path = _LM) -> str:
    """Returns the SHA-256 of the declarations of config classes in lm's sources, without the bodies of their methods."""
    found = hashlib.sha256()
    for path in sources(folder):
        for declaration in _DECLARATION.findall(path.read_bytes()):
            found.update(_METHOD.sub(b"", declaration))
    return found.hexdigest()


@cache
def _listed() -> type[Config] | None:
    """Returns the class built from keys.json; None where there is no list, or it is not of these sources."""
    try:
        listed = json.loads(FILE.read_bytes())
    except (OSError, ValueError):
        return None
    return made(listed["classes"]) if listed["declared"] == declared() else None


def made(classes: list[Tree]) -> type[Config]:
    """Builds classes in order and returns the last; the fields of each may have the classes before it as types."""
    found: dict[str, Any] = {"Config": Config, "Slot": Slot}
    for told in classes:
        fields: Any = {name: _field(field, found) for name, field in told["fields"].items()}
        group = {"group": told["group"]} if "group" in told else {}
        found[told["name"]] = create_model(
            told["name"], __base__=found[told["of"]], __module__=FILE.stem, __doc__=told["doc"], __cls_kwargs__={**_LAZY, **group}, **fields
        )
    last: type[Config] = found[classes[-1]["name"]]
    return last


def _field(told: Tree, found: Tree) -> tuple[Any, Any]:
    annotation = _type(told["type"], found)
    default = {"default": told["default"]} if "default" in told else {}
    if default and isinstance(told["default"], dict) and told["default"]:  # of a config
        default = {"default_factory": partial(_config, annotation, told["default"])}
    return annotation, Field(description=told["doc"], **told["rules"], **default)


def _config(annotation: Any, tree: Tree) -> Config | dict[str, Any]:
    """Returns the config that a tree stands for under this annotation, or a dict of configs."""
    if (entry := entry_type(members(annotation)[0])) is not None:
        return {name: _config(entry, each) for name, each in tree.items()}
    cls = variant(annotation, tree)
    assert cls is not None
    return from_tree(cls, tree)


def _type(told: Any, found: Tree) -> Any:
    """Returns the annotation that `tools.keys` has written as plain JSON."""
    plain = {"int": int, "float": float, "bool": bool, "str": str, "null": None}
    if isinstance(told, str):
        return plain[told] if told in plain else found[told]
    [(sort, of)] = told.items()
    if sort == "one of":
        return Literal[tuple(of)]
    if sort == "ruled":
        return Annotated[_type(of["type"], found), Field(**of["rules"])]
    inner = [_type(part, found) for part in (of if sort == "any of" else [of])]
    if sort == "any of":
        return Union[tuple(inner)]  # noqa: UP007  # of as many as there are
    entry: Any = inner[0]
    if sort == "list":
        return list[entry]
    return Named[entry] if isinstance(entry, type) and issubclass(entry, Slot) else dict[str, entry]
