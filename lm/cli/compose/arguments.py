"""What verbs take beside overrides of `lm train`: `key=value` literally, so that a prompt may hold anything, and `from=FOLDER`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin

from lm.errors import ConfigError
from lm.schema import Config, Tree, did_you_mean, from_tree, members

C = TypeVar("C", bound=Config)


def parse_literal(cls: type[C], args: Sequence[str]) -> C:
    """Split at the first '='. Text fields take the value as it stands, others read it as JSON; a key given again adds to a list field.
    Raises ConfigError."""
    tree: Tree = {}
    for arg in args:
        key, equals, text = arg.partition("=")
        if key == "traceback" and key not in cls.model_fields:
            continue
        if not equals:
            raise ConfigError(f"{arg}: this is not of the form key=value. {did_you_mean(arg, cls.model_fields)}")
        if key not in cls.model_fields:
            raise ConfigError(f"{key}: there is no such key. {did_you_mean(key, cls.model_fields)}")
        options = members(cls.model_fields[key].annotation)
        tree[key] = _joined(key, tree[key], text, options) if key in tree else _typed(text, options)
    return from_tree(cls, tree)


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


FROM = "from  text [none, must be set]  Run, model or checkpoint folder."


def take(args: Sequence[str], key: str) -> tuple[str | None, list[str]]:
    """The value of key=value, and the other arguments. Raises ConfigError where it is given twice."""
    given = [arg.removeprefix(f"{key}=") for arg in args if arg.startswith(f"{key}=")]
    if len(given) > 1:
        raise ConfigError(f"{key}: it was given {len(given)} times ({', '.join(given)}). Give it once.")
    return (given[0] if given else None), [arg for arg in args if not arg.startswith(f"{key}=")]


def take_from(verb: str, args: Sequence[str]) -> tuple[str, list[str]]:
    """The folder of `from=`, which no class can have as a field, and the other arguments. Raises ConfigError unless it is given once."""
    folder, rest = take(args, "from")
    if not folder:
        others = " ".join(arg for arg in rest if not arg.startswith("traceback="))
        instead = f" ({others[:80]} names none)" if others else ""
        raise ConfigError(f"from: no model was given{instead}, and one is needed. Write lm {verb} from=runs/NAME.")
    return folder, rest


_FLAGS = ("-m", "--multirun", "--cfg", "--config-dir", "--help")


@dataclass(frozen=True)
class Call:
    """The arguments, flags apart from overrides; flags stand anywhere."""

    overrides: list[str]
    multirun: bool
    show_config: bool


def parse_call(args: Sequence[str]) -> Call:
    """Raises ConfigError for an unknown flag."""
    overrides: list[str] = []
    multirun, cfg = False, False
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        if arg in ("-m", "--multirun"):
            multirun = True
        elif arg == "--cfg" or arg.startswith("--cfg="):
            what = arg.removeprefix("--cfg=") if "=" in arg else (queue.pop(0) if queue else "")
            if what != "job":
                raise ConfigError(f"--cfg: '{what}' is not something to print. Write --cfg job.")
            cfg = True
        elif arg.startswith("-"):
            raise ConfigError(f"{arg}: there is no such flag. {did_you_mean(arg, _FLAGS)}")
        else:
            overrides.append(arg)
    return Call(overrides, multirun, cfg)
