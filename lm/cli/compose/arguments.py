"""The arguments of a verb: its own `key=value`, taken literally so that a prompt may hold anything, and overrides of `lm train`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from keyword import iskeyword
from typing import Any, TypeVar, get_args, get_origin

from lm.cli.compose.quoting import in_shell, stated
from lm.errors import ConfigError
from lm.schema import Config, Tree, from_tree, members
from lm.spelling import did_you_mean, first_sentence

C = TypeVar("C", bound=Config)


def take(cls: type[C], args: Sequence[str]) -> tuple[C, list[str]]:
    """Returns the verb with its own keys, and the other arguments. Arguments are split at the first '='. Text fields take the value
    literally, others read it as JSON; a repeated key adds to a list field. Raises ConfigError."""
    tree: Tree = {}
    rest: list[str] = []
    for arg in args:
        key, equals, text = arg.partition("=")
        name = key + "_" * iskeyword(key)
        if not equals or name not in cls.model_fields:
            rest.append(arg)
            continue
        options = members(cls.model_fields[name].annotation)
        tree[name] = _joined(key, tree[name], text, options) if name in tree else _typed(text, options)
    if missing := [name for name, field in cls.model_fields.items() if field.is_required() and tree.get(name, "") == ""]:
        raise ConfigError(_none_given(cls, missing, rest))
    return from_tree(cls, tree), rest


def _none_given(cls: type[Config], missing: Sequence[str], rest: Sequence[str]) -> str:
    """Returns the sentence on the first missing key; its remedy has them all."""
    others = " ".join(arg for arg in rest if not arg.startswith("traceback="))
    given = f" ({others[:80]} names none)" if others else ""
    what = first_sentence(cls.model_fields[missing[0]].description or missing[0])
    asked = {name: f"{name.rstrip('_')}={name.upper()}" for name in sorted(missing, key="from_".__ne__)}
    if "from_" in asked:
        asked["from_"] = f"from={next((arg for arg in rest if '=' not in arg), 'runs/NAME')}"
    remedy = f"Write lm {cls.__name__.lower()} {' '.join(asked.values())}"
    return f"{missing[0].rstrip('_')}: none was given{given}, and one is needed: {what[0].lower()}{what[1:]}. {remedy}."


def refuse_spaced(args: Sequence[str], words: Sequence[str]) -> None:
    """Raises ConfigError for an argument after a key=value that is no key=value itself, as when a value with spaces is not quoted."""
    for at, arg in enumerate(args[1:], 1):
        if arg.startswith("="):
            raise ConfigError(f"{arg}: there is a space beside the '='. Write {args[at - 1]}={''.join(args[at : at + 2]).lstrip('=')}.")
    for at, arg in enumerate(args[1:], 1):
        key, equals, text = args[at - 1].partition("=")
        if equals and not key.startswith("-") and "=" not in arg and arg not in words and arg[:1] not in ("-", "~"):
            more = takewhile(lambda arg: "=" not in arg and arg[:1] not in ("-", "~"), args[at:])
            quoted = f"{key}={in_shell(' '.join(filter(None, [text, *more])))}"
            raise ConfigError(f"{arg}: this is not of the form key=value. If it belongs to the value of {key}, write {quoted} in quotes.")


def _joined(key: str, before: Any, text: str, options: list[Any]) -> list[Any]:
    lists = [option for option in options if get_origin(option) is list]
    if not lists:
        raise ConfigError(
            f"{key}: it was given twice, as {before if not isinstance(before, str) else before[:80]!r} and {text[:80]!r}. Give it once."
        )
    return [*(before if isinstance(before, list) else [before]), _typed(text, members(get_args(lists[0])[0]))]


def _typed(text: str, options: list[Any]) -> Any:
    inner = [part for option in options if get_origin(option) is list for part in members(get_args(option)[0])]
    if str in options:
        optional = type(None) in options and not inner  # a field of several texts holds prompts, which may be any text
        return None if text == "null" and optional else text
    if str in inner:
        return [text]
    if inner and not text.startswith("["):
        return [_typed(part, inner) for part in text.split(",")]
    try:
        return json.loads(text.lower() if bool in options else text)  # True, as in Python
    except ValueError:
        return text


FLAGS = ("-m", "--multirun", "--cfg", "--config-dir", "--help")
_SHORT = {"-i": "--info", "-r": "--run", "-p": "--package", "-cn": "--config-name", "-cp": "--config-path"}
_OF_HYDRA = {
    "--config-name": "Write recipes=NAME, on top of which the other overrides come",
    "--config-path": "Write --config-dir FOLDER, which adds to lm's own",
    "--info": "`lm explain KEY` says where a value comes from, and --cfg job prints them all",
    "--package": "`lm explain SECTION` prints a part of the config, and --cfg job all of it",
    "--resolve": "--cfg job prints values alone, with nothing left to resolve",
    "--run": "Leave it out",
}
"""Flag of Hydra -> what is here instead."""


@dataclass(frozen=True)
class Call:
    """The parsed arguments: overrides, and flags, which may come anywhere."""

    overrides: list[str]
    multirun: bool
    show_config: bool


def parse_call(args: Sequence[str]) -> Call:
    """Separates flags from overrides. Raises ConfigError for an unknown flag."""
    overrides: list[str] = []
    multirun, cfg = False, False
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        if arg in ("-m", "--multirun"):
            multirun = True
        elif arg in ("--cfg", "-c") or arg.startswith("--cfg="):
            what = arg.removeprefix("--cfg=") if "=" in arg else (queue.pop(0) if queue else "")
            if what != "job":
                raise ConfigError(f"--cfg: '{what}' is not something to print. Write --cfg job.")
            cfg = True
        elif (flag := arg.partition("=")[0]) in _OF_HYDRA or flag in _SHORT:
            raise ConfigError(f"{flag}: there is no such flag. {_OF_HYDRA[_SHORT.get(flag, flag)]}.")
        elif arg.startswith("-"):
            raise ConfigError(
                f"{arg}: there is no such flag, and keys are written without dashes, as key=value. {did_you_mean(arg, FLAGS)}"
            )
        else:
            overrides.append(arg)
    _refuse_doubled(overrides)
    return Call(overrides, multirun, cfg)


def _refuse_doubled(overrides: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for text in overrides:
        for path in stated(text):
            if path in seen:
                raise ConfigError(f"{path}: it was given twice, as {seen[path][:80]} and as {text[:80]}. Give it once.")
            seen[path] = text


def overrides_of(args: Sequence[str]) -> list[str]:
    """Returns the overrides given to a verb other than `lm train`. Raises ConfigError for -m or --cfg."""
    call = parse_call(args)
    if call.multirun or call.show_config:
        raise ConfigError(f"{'-m' if call.multirun else '--cfg'}: only lm train runs sweeps and prints configs. Leave it out.")
    return call.overrides
