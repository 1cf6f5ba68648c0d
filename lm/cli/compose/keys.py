"""Which keys a composed tree may have, by dotted path, and the error messages for unknown ones."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import get_origin

from pydantic.fields import FieldInfo

from lm.cli.compose import catalog
from lm.cli.compose.naming import known_keys
from lm.cli.listing import known
from lm.cli.listing.nearest import meant, of_hydra
from lm.errors import ConfigError
from lm.schema import Config, Tree, entry_type, find_field, kind_from_key, members, variant, variants
from lm.spelling import did_you_mean, nearest


def fields(cls: type[Config], tree: Tree, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields every leaf key, as dotted path and field, of the kinds that `tree` chooses."""
    for key, field in cls.model_fields.items():
        if key != "kind":
            yield from _leaves(field, tree.get(key), f"{prefix}{key}")


def _leaves(field: FieldInfo, value: object, path: str) -> Iterator[tuple[str, FieldInfo]]:
    entry, section = entry_type(field.annotation), value if isinstance(value, dict) else {}
    if (inner := variant(field.annotation, value)) is not None and not isinstance(value, int):
        yield from fields(inner, section, f"{path}.")
    elif entry is not None and section:
        for name, part in section.items():
            yield from _leaves(FieldInfo.from_annotation(entry), part, f"{path}.{name}")
    else:
        yield path, field


def check_section(path: str) -> None:
    """Raises ConfigError, as `check_key`, where the first part of a dotted path does not exist."""
    if path.partition(".")[0] not in known.root().model_fields:
        check_key(path, {})


def check_key(path: str, tree: Tree) -> FieldInfo:
    """Returns the field of a dotted path. Raises ConfigError naming the first part that does not exist, and similar keys that do."""
    parts = path.split(".")
    if parts[0] == "plugins":
        raise ConfigError(f"{path}: code is named by a person, never by a config. Write plugins=my_norm.py, or set LM_PLUGINS.")
    if (said := of_hydra(path)) is not None:
        raise ConfigError(said)
    cls = known.root()
    owner, field = find_field(cls, tree, parts[:1])
    if field is not None and entry_type(field.annotation) is not None:  # keys are free names, and perhaps name a kind
        held = tree.get(parts[0])
        tree = {**tree, parts[0]: kind_from_key({key: {} for key in parts[1:2]} | (held if isinstance(held, dict) else {}))}
    for n in range(1, len(parts) + 1):
        parent, (owner, field) = field, find_field(cls, tree, parts[:n])
        if field is None:
            raise ConfigError(_unknown(parts, n, owner, parent, tree))
    assert field is not None
    return field


def choosing(path: str, tree: Tree) -> str | None:
    """Returns the override that chooses a kind with the first unknown key of this path; None where all are known, or no kind has it."""
    parts = path.split(".")
    field: FieldInfo | None = None
    for n in range(1, len(parts) + 1):
        parent, (_, field) = field, find_field(known.root(), tree, parts[:n])
        if field is None:
            kinds = variants(parent.annotation) if parent is not None else {}
            return next(iter(_having(".".join(parts[: n - 1]), parts[n - 1], kinds)), None)
    return None


def of_another_kind(path: str, section: str, tree: Tree) -> bool:
    """Whether a path is a key not of the section's chosen kind but of a sibling kind."""
    _, field = find_field(known.root(), tree, section.split("."))
    assert field is not None
    key = path.removeprefix(f"{section}.").split(".")[0]
    _, found = find_field(known.root(), tree, [*section.split("."), key])
    return found is None and any(key in kind.model_fields for kind in variants(field.annotation).values())


def require_section(path: str, field: FieldInfo, value: object, raw: str | None = None) -> None:
    """Raises ConfigError for a value in the place of a section.  raw: as it was typed; None: it stands in a file."""
    optional = value is None and type(None) in members(field.annotation)
    kinds = variants(field.annotation)
    section, _, name = path.partition(".")
    if section in ("callbacks", "metrics") and name and "." not in name and not kinds and not isinstance(value, dict):
        found = [key for key in meant(name, section, ()) if key.startswith("trainer.")]
        hint = f"{_meaning(found)} " if found else ""
        raise ConfigError(f"{path}: in {section} stand those of one's own, and none is known. {hint}One's own comes with plugins=FILE.py.")
    if path != "seed" and kinds and not isinstance(value, dict) and not optional:  # a seed is all seeds
        group, given = path.replace(".", "/"), raw if raw is not None else "null" if value is None else value
        if group in catalog.groups():
            remedy = f"Write {group}={given}"
        elif value is None and path.rpartition(".")[2] in kinds:  # an entry whose name says its kind
            remedy = f"Write ~{path} to be without it"
        else:
            remedy = f"Write {path}.kind={given}" if str(value) in kinds else f"Set one of its keys, as {path}.x{'=VALUE' if raw else ''}"
        raise ConfigError(f"{path}: {given} was given for a section. {remedy}.")


def chosen_as_value(path: str, values: Mapping[str, object], kinds: bool) -> str | None:
    """Returns the sentence on a file's values where they give an option to a section of this path, or its kind, as if it were a value;
    None where they do not.  kinds: whether a kind is refused."""
    parts = path.split(".")
    for section in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
        for key in (section, *[f"{section}.kind"] * kinds):
            if key in values and (group := section.replace(".", "/")) in catalog.groups() and group not in catalog.GLOBAL:
                option = catalog.options_of_kind(group, str(values[key]))[:1] or ["OPTION"]
                given = "null" if values[key] is None else values[key]
                remedy = f"Write '- override /{group}: {option[0]}' there"
                return f"{key}: {given} was given as a value, and the option of a section is chosen under defaults. {remedy}."
    return None


def _unknown(parts: list[str], n: int, owner: type[Config], parent: FieldInfo | None, tree: Tree) -> str:
    """Returns the sentence on the n-th part of a path, which does not exist.  owner: the class that lacks it.  parent: the field of its
    section; None where the path is of one part."""
    here, key, section = ".".join(parts[:n]), parts[n - 1], ".".join(parts[: n - 1])
    if n > 1 and parent is not None and not variants(parent.annotation):
        if any(get_origin(option) is list for option in members(parent.annotation)):
            return f"{here}: {section} is a list. Write {section}=[{{{key}:...}}], with brackets around each entry's own."
        return f"{here}: {section} is a value and has no keys. Leave .{key} out."
    kinds, said = variants(parent.annotation) if parent is not None else {}, at(tree, parts[: n - 1])
    if kinds and "" not in kinds and str(said.get("kind") if isinstance(said, dict) else None) not in kinds:
        return _no_kind(section, key, said, kinds)
    if here in catalog.GLOBAL:
        return f"{here}: this chooses a file, and has no keys. Write {here}=NAME on the command line."
    if n == 1:
        if found := meant(parts[-1], key, ()) if len(parts) > 1 else []:  # in a section of another program
            return f"{'.'.join(parts)}: there is no such key. {_meaning(found)}"
        return f"{here}: there is no such key. {_elsewhere(key, [*owner.model_fields, *catalog.GLOBAL], tree)}"
    kind = owner.model_fields.get("kind")
    if kind and key == kind.default:
        return f"{here}: the keys of kind '{key}' stand in {section} itself. Leave .{key} out."
    own = [name for name in owner.model_fields if name != "kind"]
    said_kind = f" in kind '{kind.default}'" if kind else ""
    siblings = {name: sibling for name, sibling in kinds.items() if name and sibling is not owner}
    others = {name for sibling in siblings.values() for name in sibling.model_fields} - {*own, "kind"}
    near = nearest(key, [*own, *sorted(others)])
    by_others = any(path.removeprefix(f"{section}.") in own for path in meant(key, section, ()))
    if near not in others or by_others:
        return f"{here}: there is no such key{said_kind}. {_elsewhere(key, own, tree, section)}"
    inner = [path for path, _ in fields(known.root(), tree) if path.startswith(f"{section}.") and path.endswith(f".{near}")]
    if inner:  # the kind that was chosen calls so a key of a section of its own
        return f"{here}: there is no such key{said_kind}. Did you mean '{inner[0]}'?"
    if section == "data" and "sources" in own:
        return f"{here}: there is no such key{said_kind}, whose sources have one each. Write data.sources=[{{...,data:{{...,{near}:...}}}}]"
    having = " or ".join(_having(section, near, siblings))
    hint = "only in others. Write" if near == key else f"Did you mean '{near}'? Write"
    return f"{here}: there is no such key{said_kind}{',' if near == key else '.'} {hint} {having} {section}.{near}=..."


def _elsewhere(key: str, own: Sequence[str], tree: Tree, section: str = "") -> str:
    """Returns a suggestion for an unknown key: the key that other programs call so, or that has the same words; else the nearest of this
    section's own keys, or for a bare word, of any section. Keys of the chosen kinds go first."""
    at_hand = [path for path, _ in fields(known.root(), tree)] if tree else []
    sections = list(known.root().model_fields)
    paths = at_hand + sorted(known_keys(), key=lambda path: (sections.index(path.partition(".")[0]), path))
    if found := meant(key, section, paths):
        found = [path for path in found if section and path.removeprefix(f"{section}.") in own] or found
        return _meaning(found)
    if not section and nearest(key, own) is None and (near := nearest(key, [path.split(".")[-1] for path in paths], least=0.8)) is not None:
        return f"Did you mean '{_as_group(next(path for path in paths if path.split('.')[-1] == near))}'?"
    return did_you_mean(key, own)


def _meaning(paths: Iterable[str]) -> str:
    return f"Did you mean {' or '.join(map(repr, map(_as_group, paths)))}?"


def _as_group(path: str) -> str:
    """Returns the path of a group as 'model/ffn' for 'model.ffn', and with its option if it has one; that of a key stays as it is."""
    name, _, option = path.partition("=")
    group = name.replace(".", "/")
    return path if group not in catalog.groups() else f"{group}={option}" if option else group


def _having(section: str, key: str, kinds: Mapping[str, type[Config]]) -> list[str]:
    """Returns the overrides that choose the kinds with this key; of several models of a kind a tiny one."""
    having, group = [kind for kind in sorted(kinds) if kind and key in kinds[kind].model_fields], section.replace(".", "/")
    if group not in catalog.groups():
        return [f"{section}.kind={kind}" for kind in having]
    options = (sorted(catalog.options_of_kind(group, kind), key=lambda name: ("tiny" not in name, len(name))) for kind in having)
    return [f"{group}={first}" for first, *_ in options]


def _no_kind(section: str, key: str, said: object, kinds: Mapping[str, type[Config]]) -> str:
    given, name = said.get("kind") if isinstance(said, dict) else None, section.rpartition(".")[2]
    if given is None and name in kinds:  # of entries whose name says their kind
        own = [option for option in kinds[name].model_fields if option != "kind"]
        return f"{section}.{key}: there is no such key in kind '{name}'. {did_you_mean(key, own)}"
    if given is None:
        own = sorted({name for cls in kinds.values() for name in cls.model_fields} - {"kind"})
        by_others = [path.removeprefix(f"{section}.") for path in meant(key, section, ())]
        near = next((name for name in by_others if name in own), nearest(key, own))
        if near is None:
            return f"{section}: it has no kind yet, and no kind ({', '.join(kinds)}) has a key '{key}'. Leave it out."
        hint = "" if near == key else f"Did you mean '{near}'? "
        return f"{section}: it has no kind yet. {hint}Write {' or '.join(_having(section, near, kinds))} {section}.{near}=..."
    return f"{section}.kind: {given!r} is not an option. {did_you_mean(str(given), kinds)}"


def at(tree: Tree, path: Sequence[str]) -> object:
    """Returns the value at a path; None where there is none."""
    found: object = tree
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found
