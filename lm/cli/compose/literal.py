"""`key=value` taken literally, for the verbs that do not compose: a prompt may hold anything."""

import json
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin

from lm.config import Config, Tree, did_you_mean, find_field, from_tree, members, variants
from lm.errors import ConfigError

C = TypeVar("C", bound=Config)


def parse_literal(cls: type[C], args: Sequence[str]) -> C:
    """Split at the first '='. Text fields take the value as it stands, others read it as JSON; a key given again adds to a list field.

    A section with kinds is chosen by name and filled by dotted keys: data=text data.files=a.txt. Raises ConfigError.
    """
    pairs = [_pair(cls, arg) for arg in args if arg not in ("traceback=true", "traceback=false") or "traceback" in cls.model_fields]
    tree: Tree = {}
    for key, value in sorted(pairs, key=lambda pair: pair[0].count(".")):  # data=text before data.files=...
        _set(cls, tree, key, value)
    return from_tree(cls, tree)


def _pair(cls: type[Config], arg: str) -> tuple[str, str]:
    key, equals, value = arg.partition("=")
    if not equals:
        raise ConfigError(f"{arg}: this is not of the form key=value. {did_you_mean(arg, cls.model_fields)}")
    return key, value


def _set(cls: type[Config], tree: Tree, key: str, text: str) -> None:
    path = key.split(".")
    owner, field = find_field(cls, tree, path)
    if field is None:
        names = [name for name in owner.model_fields if name != "kind"]
        raise ConfigError(f"{key}: there is no such key. {did_you_mean(path[-1], names)}")
    section = tree
    for parent in path[:-1]:
        section = section.setdefault(parent, {})
    last, options = path[-1], members(field.annotation)
    kinds = variants(field.annotation)
    if kinds and text not in kinds:
        raise ConfigError(f"{key}: {text!r} is not an option. {did_you_mean(text, kinds)}")
    if kinds:
        section[last] = {"kind": text}
    elif last in section:
        section[last] = _joined(key, section[last], text, options)
    else:
        section[last] = _typed(text, options)


def _joined(key: str, before: Any, text: str, options: list[Any]) -> list[Any]:
    lists = [option for option in options if get_origin(option) is list]
    if not lists:
        raise ConfigError(f"{key}: it was given twice, as {before!r} and {text!r}. Give it once.")
    return [*(before if isinstance(before, list) else [before]), _typed(text, list(get_args(lists[0])))]


def _typed(text: str, options: list[Any]) -> Any:
    if str in options:
        return text
    inner = [get_args(option)[0] for option in options if get_origin(option) is list]
    if inner and (inner[0] is str or not text.startswith("[")):
        return [_typed(text, inner)]
    try:
        return json.loads(text)
    except ValueError:
        return text
