"""Which of several names a person means, and what is said of one in short."""

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

_MANY = 12  # options, which nobody reads


def words(key: str) -> frozenset[str]:
    """Returns the parts of a name, one form for singular and plural: those of `n_layers` are those of `num_layer`."""
    parts = [part.rstrip("s") for part in re.split(r"[^a-z0-9]+", key.lower())]
    return frozenset("n" if part == "num" else part for part in parts if part)


def nearest(given: str, options: Iterable[str], least: float = 0.6) -> str | None:
    """Returns the option that is a slip of the key away; else one that has all words of what was given, or only such, as max_steps has
    those of `steps`; else one that begins it or begins with it; else one written somewhat alike, `least` of 1; None where none is near."""
    options, mine = list(options), words(given)
    theirs = {option: words(option) for option in options}
    inside = [option for option, each in theirs.items() if mine and each and (mine <= each or each <= mine)]
    inside.sort(key=lambda option: -len(mine & theirs[option]) / len(mine | theirs[option]))
    begun = [option for option in options if min(len(given), len(option)) > 2 and (option.startswith(given) or given.startswith(option))]
    slips, alike = (difflib.get_close_matches(given, options, n=1, cutoff=cutoff) for cutoff in (0.85, least))
    return next(iter([*slips, *inside, *begun, *alike]), None)


def did_you_mean(given: str, options: Iterable[str], other_names: Mapping[str, str] = MappingProxyType({})) -> str:
    """'Did you mean 'x'?' where something is near, then all options in order, unless they are many and one is near.

    other_names: an option, or option=value -> what other programs call it.
    """
    options, theirs = [*options], given.lower().replace("-", "_")
    for option, names in other_names.items():
        if theirs in names.split() and option.partition("=")[0] in options:
            return f"Did you mean '{option}'?"
    near, ranked = nearest(given, options), sorted(options, key=lambda option: -difflib.SequenceMatcher(None, given, option).ratio())
    hint = f"Did you mean '{near}'? " if near is not None else ""
    if near is not None and len(ranked) > _MANY:
        return f"{hint}It is one of {len(ranked)}."
    return f"{hint}Options: {', '.join(sorted(ranked, key=lambda option: (option != near, option)))}." if ranked else "There are none."


def first_sentence(text: str) -> str:
    """Returns it on one line, without its full stop; one within a number or a name ends nothing."""
    return " ".join(text.split()).partition(". ")[0].removesuffix(".")


def below(key: str, names: Iterable[str]) -> bool:
    """Says whether a dotted key is one of these, or stands within one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def means(pattern: str, name: str) -> bool:
    """Says whether a dotted name is meant: by a pattern such as blocks.0.*, or by parts of it in a row, such as attention.q."""
    return fnmatchcase(name, pattern) or f".{pattern}." in f".{name}."
