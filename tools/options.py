"""The arguments of the programs in tools/, key=value. A mistake ends with one sentence on stderr and exit code 2."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lm.printing import one_line
from lm.spelling import did_you_mean


def refuse(sentence: str) -> NoReturn:
    """Ends the program."""
    print(f"{Path(sys.argv[0]).name}: {one_line(sentence)}", file=sys.stderr)
    raise SystemExit(2)


def asked(args: Sequence[str], page: str | None, names: Iterable[str]) -> str:
    """Returns the first argument, which says what is to be done."""
    _help(args, page)
    known = [*names]
    if not args:
        refuse(f"nothing was asked for. Options: {', '.join(known)}.")
    if args[0] not in known:
        refuse(f"{args[0]!r} is nothing to do. {did_you_mean(args[0], known)}")
    return args[0]


def options(
    args: Sequence[str],
    page: str | None,
    defaults: Mapping[str, Any],
    choices: Mapping[str, Iterable[str]] | None = None,
    zero: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns key=value arguments over these defaults, each of its default's type: text, a whole number above 0, true or false, or a
    list of texts or numbers with commas between. --help prints the page.

    choices: of a text or of each in a list, what there is. zero: numbers that may be 0.
    """
    _help(args, page)
    found: dict[str, Any] = {}
    for arg in args:
        key, equals, text = arg.partition("=")
        if not equals or key not in defaults:
            what = "there is no such option" if equals else "this is not of the form key=value"
            refuse(f"{key}: {what}. {did_you_mean(key, defaults)}" if defaults else f"{arg}: no option is taken. Leave it out.")
        if key in found:
            refuse(f"{key}: it was given twice. Give it once.")
        found[key] = _value(key, text, defaults[key], key in zero)
        known = [*(choices or {}).get(key, ())]
        for each in found[key] if isinstance(found[key], list) else [found[key]]:
            if known and each not in known:
                refuse(f"{key}: {each!r} is not an option. {did_you_mean(str(each), known)}")
    return {**defaults, **found}


def folders(args: Sequence[str], page: str | None, least: int = 1, most: int | None = None) -> list[Path]:
    """Returns the arguments, each of which is a folder."""
    _help(args, page)
    for arg in args:
        if not Path(arg).is_dir():
            refuse(f"{arg}: there is no such folder. Check the path.")
    if len(args) < least or (most is not None and len(args) > most):
        refuse(f"{len(args)} folders were given. Give {least if most is None else f'{least} or {most}'}{' or more' * (most is None)}.")
    return [Path(arg) for arg in args]


def _value(key: str, text: str, default: Any, zero: bool) -> Any:
    if isinstance(default, list):
        return [_value(key, part, default[0] if default else "", zero) for part in text.split(",")]
    if isinstance(default, bool):
        if text not in ("true", "false"):
            refuse(f"{key}: {text!r} is neither true nor false. Write one of them.")
        return text == "true"
    if isinstance(default, int):
        if not (text.isascii() and text.isdecimal() and (int(text) or zero)):
            refuse(f"{key}: {text!r} is no whole number of {0 if zero else 1} or more. Write one.")
        return int(text)
    if not text:
        refuse(f"{key}: nothing stands behind '='. Write something, or leave it out.")
    return text


def _help(args: Sequence[str], page: str | None) -> None:
    if any(arg in ("-h", "--help", "help") for arg in args):
        print(page)
        raise SystemExit
