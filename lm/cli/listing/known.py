"""The keys of `lm train`, known without the code behind them, which brings torch: a mistyped one is told at once.

`keys.json` lists the fields of TrainConfig and of all that it may hold. Classes are made of it that refuse what the real ones refuse by
their fields, in the same words, and can do nothing else. `make keys` writes it; where the sources have changed since, it is left aside.
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
from lm.schema import Config, Named, Slot, Tree, entry_type, from_tree, members, variant

if TYPE_CHECKING:
    from lm.training.config import TrainConfig

FILE = Path(__file__).with_name("keys.json")
_LM = Path(__file__).parents[2]
_SOURCES = ("schema.py", "ops/**/*.py", "nn/**/*.py", "adapters/**/*.py", "data/**/*.py", "generation/config.py", "training/**/*.py")
_DECLARATION = re.compile(rb"^class \w+\((?!nn\.Module).*\n(?:(?: .*)?\n)*|^\w+ = .*\n", re.M)
_METHOD = re.compile(rb"^    def .*\n(?:(?:    [ )].*)?\n)*", re.M)
_LAZY: Any = {"defer_build": True, "use_attribute_docstrings": False, "validate_default": False}  # most are never used


def root() -> type[Config]:
    """Returns TrainConfig, or what is made of the list where that is quicker and as good: no plugin adds kinds, and it is up to date."""
    if plugins.loaded() or "lm.training.config" in sys.modules or (listed := _listed()) is None:
        return real()
    return listed


@cache
def real() -> type["TrainConfig"]:
    """Returns TrainConfig, which brings torch. Not asked twice: what is young would count as old each time."""
    with collector.paused():
        from lm.training.config import TrainConfig
    return TrainConfig


def sources(folder: Path = _LM) -> list[Path]:
    """Returns the files that may say something of config classes."""
    return sorted(path for pattern in _SOURCES for path in folder.glob(pattern))


def declared(folder: Path = _LM) -> str:
    """Returns the SHA-256 of what the sources of lm say of config classes, the bodies of their methods left out."""
    found = hashlib.sha256()
    for path in sources(folder):
        for declaration in _DECLARATION.findall(path.read_bytes()):
            found.update(_METHOD.sub(b"", declaration))
    return found.hexdigest()


@cache
def _listed() -> type[Config] | None:
    """None where there is no list of these sources."""
    try:
        listed = json.loads(FILE.read_bytes())
    except (OSError, ValueError):
        return None
    return made(listed["classes"]) if listed["declared"] == declared() else None


def made(classes: list[Tree]) -> type[Config]:
    """Returns the last of these classes, each of which may have the ones before it in its fields."""
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
    """The config that a tree means under this annotation, or a dict of such."""
    if (entry := entry_type(members(annotation)[0])) is not None:
        return {name: _config(entry, each) for name, each in tree.items()}
    cls = variant(annotation, tree)
    assert cls is not None
    return from_tree(cls, tree)


def _type(told: Any, found: Tree) -> Any:
    """What `tools.keys` says of an annotation, as an annotation again."""
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
