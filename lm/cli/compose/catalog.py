"""The catalog of groups and options in conf/ and recipes/, which lie beside the package in a checkout and inside it in a wheel.

A user's own folder, with groups like those of conf/ and perhaps recipes/, adds options, and so does each kind of a plugin.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lm import plugins
from lm.errors import CheckpointError, ConfigError
from lm.schema import Tree, flatten
from lm.spelling import did_you_mean
from lm.storage.reading import read_text

OWN = "LM_CONFIG_DIR"
_MOST_LEVELS = 64
_Parser = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # the one in C is twelve times as fast
GLOBAL = ("recipes", "debug")
"""Groups whose files speak of the whole tree (`# @package _global_`), not of their own section."""


@cache
def root() -> Path:
    """Returns the folder that holds conf/ and recipes/."""
    package = Path(__file__).resolve().parents[2]
    return package if (package / "conf").is_dir() else package.parent


def train_file() -> Path:
    """Returns the file that chooses the default option of each group."""
    return root() / "conf" / "train.yaml"


def own() -> Path | None:
    """Returns the user's own folder of options; None where there is none."""
    named = os.environ.get(OWN)
    return Path(named) if named else None


def own_options() -> list[tuple[str, str]]:
    """Returns (group, option) of each file in the user's own folder, but for folders that are no group."""
    if (folder := own()) is None:
        return []
    return [(group, option) for group, files in _options(folder, folder / "recipes").items() if group in groups() for option in files]


def flags() -> list[str]:
    """Returns the command-line flags that name the user's own folder; [] where there is none."""
    return ["--config-dir", str(own())] if own() else []


def add_own(folder: str, by: str) -> None:
    """Adds a user's folder for this process and its children. Raises ConfigError where it adds no options, or one that exists already.

    by: the flag or environment variable that named the folder.
    """
    path = Path(os.path.realpath(Path(os.path.expanduser(folder))))
    shipped = _options(root() / "conf", root() / "recipes")
    added = _options(path, path / "recipes")
    if not any(added.get(group) for group in shipped):
        raise ConfigError(f"{by}={folder}: it must hold yaml files in folders such as recipes/, model/ or data/. Check the path.")
    for group in shipped:
        for option in added.get(group, {}).keys() & shipped[group].keys():
            raise ConfigError(f"{shown(added[group][option])}: lm has an option {group}={option} of its own. Rename yours.")
        for file in added.get(group, {}).values():
            read(file)  # checked before Hydra reads it, which would wait for pipes and expand aliases
    os.environ[OWN] = str(path)


def as_own(path: str, group: str = "") -> str:
    """Returns the sentence that says how to choose the option of a yaml file; "" for what is not the path of one.

    group: the one that it was given for, if any.
    """
    file = Path(path)
    if file.suffix not in (".yaml", ".yml"):
        return ""
    parts, shipped = file.with_suffix("").parts, groups()
    at = max((n for n, part in enumerate(parts[:-1]) if part in shipped), default=None)
    if at is not None:
        split = at + 1 if parts[at] == "recipes" else len(parts) - 1
        group, option = "/".join(parts[at:split]), "/".join(parts[split:])
    else:
        option = "/".join(parts)
    if option in shipped.get(group, ()):
        return f"Write {group}={option}."
    if at is None or group not in shipped or file.suffix == ".yml":
        name = f"{group or 'recipes'}={file.stem}"
        return f"To use a file of yours, put it into FOLDER/{group or 'recipes'}/, named .yaml, and write --config-dir FOLDER {name}."
    return f"To use a file of yours, write --config-dir {Path(*parts[:at])} {group}={option}."


def groups() -> dict[str, list[str]]:
    """Returns group -> options, such as 'model/ffn' -> ['geglu', ...] and 'recipes' -> ['pretrain/tiny', ...]."""
    files, added = _files(root(), own()), plugin_kinds()
    return {group: [*files.get(group, ()), *added.get(group, ())] for group in files | added}


def plugin_kinds() -> dict[str, dict[str, str]]:
    """Returns group -> kind -> its plugin, for kinds without an option file of their own. Raises ConfigError for a kind that has the name
    of another option."""
    return _plugin_kinds(root(), own(), tuple(plugins.loaded()))


@cache
def _plugin_kinds(root: Path, own: Path | None, loaded: tuple[plugins.Plugin, ...]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for plugin in loaded:
        for cls in plugin.kinds:
            kind, group = str(cls.model_fields["kind"].default), cls.group
            file = _files(root, own).get(group or "", {}).get(kind)
            if file is not None and read(file).get("kind") != kind:
                raise ConfigError(f"{plugin.origin}: its kind {kind!r} is named like lm's option {group}={kind}. Rename it.")
            if group is not None and file is None:
                found.setdefault(group, {})[kind] = plugin.origin
    return found


def source(group: str, option: str) -> str:
    """Returns the file of an option, or the plugin that defines it as a kind."""
    return plugin_kinds().get(group, {}).get(option) or shown(file_of(group, option))


def file_of(group: str, option: str) -> Path:
    """Returns the yaml file of an option."""
    return _files(root(), own())[group][option]


@cache
def _files(root: Path, own: Path | None) -> dict[str, dict[str, Path]]:
    found = _options(root / "conf", root / "recipes")
    if own is not None:
        for group, files in _options(own, own / "recipes").items():
            if group in found:
                found[group] |= files
    return found


def _options(conf: Path, recipes: Path) -> dict[str, dict[str, Path]]:
    """Returns group -> option -> file."""
    found: dict[str, dict[str, Path]] = {}
    for file in sorted(conf.rglob("*.yaml")):
        if file.parent != conf and not file.is_relative_to(recipes):
            found.setdefault(file.parent.relative_to(conf).as_posix(), {})[file.stem] = file
    return found | {"recipes": {file.relative_to(recipes).with_suffix("").as_posix(): file for file in sorted(recipes.rglob("*.yaml"))}}


def shown(file: Path) -> str:
    """Returns a file's path, relative if it is below the current folder."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def values(group: str, option: str | None) -> dict[str, Any]:
    """Returns the values in an option's file, by their dotted paths in the whole tree; {} of none."""
    if option is None:
        return {}
    of_plugin = option in plugin_kinds().get(group, {})
    beside = ("defaults", "study") if group == "recipes" else ("defaults",)
    tree = {"kind": option} if of_plugin else {key: value for key, value in read(file_of(group, option)).items() if key not in beside}
    return flatten(tree, "" if group in GLOBAL else f"{group.replace('/', '.')}.")


def studies() -> list[str]:
    """Returns the recipes that have a block `study`."""
    return [name for name in groups()["recipes"] if "study" in read(file_of("recipes", name))]


def study(recipe: str) -> Tree | None:
    """Returns a recipe's block `study`, which `lm ablate` reads and `lm train` ignores; None where it has none."""
    if recipe not in studies():
        return None
    file = file_of("recipes", recipe)
    if not isinstance(found := read(file)["study"], dict):
        raise ConfigError(f"{shown(file)}: study must be key: value pairs, such as variants and baseline. Mend the file.")
    return {str(key): value for key, value in found.items()}


def options_of_kind(group: str, kind: str) -> list[str]:
    """Returns the option with the kind's name, or else all options that have this kind."""
    section = group.replace("/", ".")
    return [kind] if kind in groups()[group] else [o for o in groups()[group] if with_inherited(group, o).get(f"{section}.kind") == kind]


def lineage(group: str, option: str) -> list[str]:
    """Returns the options of the group that this one inherits from, the most general first, and last itself."""
    bases = [entry for entry in defaults(group, option) if isinstance(entry, str) and entry != "_self_"]
    for base in bases:
        if base not in (known := groups()[group]):
            hint = did_you_mean(base.removeprefix(f"/{group}/"), known)
            raise ConfigError(f"{source(group, option)}: defaults: {base!r} is not an option of {group}. {hint}")
    return [*(name for base in bases for name in lineage(group, base)), option]


def with_inherited(group: str, option: str | None) -> dict[str, Any]:
    """Returns the values of an option as `values` does, and those that it inherits."""
    return {path: value for name in (lineage(group, option) if option else []) for path, value in values(group, name).items()}


def preset_slots(preset: str) -> dict[str, str]:
    """Returns the slot options that a model preset chooses or inherits, as group -> option."""
    entries = [entry for name in lineage("model", preset) for entry in defaults("model", name) if isinstance(entry, dict)]
    return {f"model/{slot.removeprefix('override ')}": option for entry in entries for slot, option in entry.items()}


def defaults(group: str, option: str) -> list[Any]:
    """Returns the Hydra defaults list of an option's file; with group '' that of conf/train.yaml."""
    of_plugin = option in plugin_kinds().get(group, {})
    return [] if of_plugin else list(read(file_of(group, option) if group else train_file()).get("defaults", []))


def optional() -> set[str]:
    """Returns the groups of which no option need be chosen: null in conf/train.yaml."""
    return {group for entry in defaults("", "train") if isinstance(entry, dict) for group, option in entry.items() if option is None}


def chooses_nothing(group: str, option: str) -> bool:
    """Whether the option exists and has no defaults list, so that it chooses no options of other groups."""
    return option in groups().get(group, ()) and not defaults(group, option)


def headline(group: str, option: str) -> str:
    """Returns the first comment of an option's file, except for the package line."""
    lines = file_of(group, option).read_text(encoding="utf-8").splitlines()
    comments = [line[1:].strip() for line in lines if line.startswith("#") and "@package" not in line]
    return comments[0] if comments else ""


@cache
def read(file: Path) -> Tree:
    """Returns a yaml file as a plain tree, in Hydra's dialect: 1e-3 is a number, a date a text. The tree is cached: do not change it."""
    try:
        tree = yaml.load(_plain(read_text(file, most_mib=1)), _Loader) or {}
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise ConfigError(f"{shown(file)}: this is not readable yaml ({' '.join(str(error).split())}). Mend the file.") from error
    assert isinstance(tree, dict)
    entries = tree.get("defaults", [])
    if not isinstance(entries, list) or not all(isinstance(entry, str | dict) for entry in entries):
        raise ConfigError(f"{shown(file)}: defaults must be a list of options, such as [nano, _self_]. Mend the file.")
    if several := [key for entry in entries if isinstance(entry, dict) for key, value in entry.items() if isinstance(value, list | dict)]:
        loggers = "'- override /logger: several', and below defaults logger: {each: {wandb: {}, csv: {}}}"
        raise ConfigError(f"{shown(file)}: defaults: {several[0]} needs one option. For two loggers write {loggers}.")
    chosen = [str(key).removeprefix("override ").strip(" /") for entry in entries if isinstance(entry, dict) for key in entry]
    if twice := [key for key in chosen if chosen.count(key) > 1]:
        raise ConfigError(f"{shown(file)}: defaults: {twice[0]} is chosen twice. Leave one out.")
    return {str(key): value for key, value in tree.items()}


class _Loader(_Parser):  # type: ignore[misc, valid-type]
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
        for first, known in _Parser.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"{twice[0]} is there twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def _plain(text: str) -> str:
    """Returns the text if it has only plain values, without aliases and tags, in few levels. Raises YAMLError otherwise."""
    depth = 0
    for event in yaml.parse(text, _Parser):
        written = event.value if isinstance(event, yaml.ScalarEvent) else isinstance(event, yaml.SequenceStartEvent)
        if depth == 0 and written:
            raise yaml.YAMLError("there must be key: value pairs")
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias; write the value out")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise yaml.YAMLError(f"it has a tag, {event.tag}; leave it out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_LEVELS:
            raise yaml.YAMLError(f"it has more than {_MOST_LEVELS} levels")
    return text
