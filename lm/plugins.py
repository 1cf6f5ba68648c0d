"""Kinds of one's own: Python files and installed packages that a person names, whose `Slot` classes are options beside ours.

Code comes from the command line (`plugins=my_norm.py`), from LM_PLUGINS or from an installed package's entry point of the group
`slotlm.kinds`, and never from a config: what a run or a model records is a plugin's name and the SHA-256 of its code, which comments and
blank lines do not change.
"""

import codecs
import hashlib
import io
import os
import sys
import tokenize
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from lm.errors import ConfigError
from lm.schema import Config, Slot, Tree

VARIABLE = "LM_PLUGINS"
"""Files, separated as in PATH; processes that we start find them here."""
GROUP = "slotlm.kinds"
COPIES = "plugins"
"""The folder within a run's where copies of the files lie, to be given by a person where the file has changed since."""
_PACKAGE = "lm_plugins"
_MOST_BYTES = 1 << 22
_ACTIVATIONS = {"keeps": "saved_activations", "gives": "kernel_outputs", "exchanges": "exchanged_activations"}
_RENAMED = {
    "Declares": {"drawn": "initializers", "draws": "named_initializers", "steered": "self_updated"},
    **dict.fromkeys(("MixerConfig", "FFNConfig", "PositionConfig", "BlockConfig"), _ACTIVATIONS),
}
"""By base class, what a class of a plugin may still define under a name that nobody asks for any more, and its name of today."""


@dataclass(frozen=True)
class Plugin:
    """What defines kinds: one file, or an installed module with those below it."""

    name: str
    origin: str
    """The file, or the entry point's value."""
    module: str
    sha256: str
    """Of the code without comments and blank lines."""
    whole: str
    """SHA-256 with them, which earlier versions recorded."""
    code: bytes = b""
    """Of a file; an installed package can be installed again."""

    @property
    def kinds(self) -> list[type[Slot]]:
        """The classes that it has added to slots."""
        return [kind for kind in _every_kind() if self.defines(kind)]

    def defines(self, kind: type) -> bool:
        """Whether this class comes from here."""
        return kind.__module__ == self.module or kind.__module__.startswith(f"{self.module}.")


_loaded: dict[str, Plugin] = {}


def load(files: Sequence[str] = ()) -> None:
    """Imports the installed plugins, those of LM_PLUGINS and these files, for this process and those that it starts.

    Raises ConfigError for one that is missing, does not import, defines no kind, or defines one that there is.
    """
    for point in _points():
        if point.name not in _loaded:
            _add(_installed(point))
    named = [*filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)), *files]
    paths = list(dict.fromkeys(Path(os.path.realpath(Path(os.path.expanduser(name)))) for name in named))
    for path in paths:
        _add(_from_file(path))
    if paths:
        os.environ[VARIABLE] = os.pathsep.join(map(str, paths))


@cache
def _points() -> list[metadata.EntryPoint]:
    """Returns the installed plugins; looked up once, since it reads a file of every installed package."""
    return list(metadata.entry_points(group=GROUP))


def take(args: Sequence[str]) -> list[str]:
    """Loads what `plugins=a.py,b.py` among the arguments names, and returns the others."""
    given = [arg.removeprefix("plugins=") for arg in args if arg.startswith("plugins=")]
    files = [name.strip(" '\"") for text in given for name in text.removeprefix("[").removesuffix("]").split(",")]
    if not all(files):
        raise ConfigError("plugins: no file was given, and each must name one. Write plugins=my_norm.py, or leave it out.")
    load(files)
    return [arg for arg in args if not arg.startswith("plugins=")]


def flags() -> list[str]:
    """Returns what names the loaded files on a command line."""
    files = [plugin.origin for plugin in _loaded.values() if plugin.module.startswith(f"{_PACKAGE}.")]
    return [f"plugins={','.join(files)}"] if files else []


def loaded() -> list[Plugin]:
    """Returns the plugins of this process."""
    return list(_loaded.values())


def used(config: Config) -> dict[str, str]:
    """Returns name -> SHA-256 of the plugins whose kinds a config has, at any depth: what is recorded beside it."""
    return {plugin.name: plugin.sha256 for plugin in _used(config)}


def files(config: Config) -> dict[str, bytes]:
    """Returns name -> code of the files among them, of which a run keeps copies."""
    return {f"{plugin.name}.py": plugin.code for plugin in _used(config) if plugin.code}


def _used(config: Config) -> list[Plugin]:
    kinds = {type(part) for part in _parts(config)}
    return [plugin for _, plugin in sorted(_loaded.items()) if any(map(plugin.defines, kinds))]


def unrecorded(config: Config) -> list[str]:
    """Returns a sentence about each kind of a config that neither lm nor a plugin defines, but the program that runs."""
    kinds = {type(part) for part in _parts(config) if isinstance(part, Slot)}
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] != "lm" and not any(each.defines(kind) for each in _loaded.values())]
    remedy = "Put it into a file, and name that one, plugins=FILE.py, for runs that must be loaded or resumed elsewhere"
    return [
        f"{kind.__name__}: {kind.__module__} defines it, no plugin, and nothing of its code is recorded. {remedy}"
        for kind in sorted(own, key=str)
    ]


def parts(config: Config) -> list[Slot]:
    """Returns the parts of a config, at any depth, whose kinds are of plugins; equal ones once."""
    found = [part for part in _parts(config) if isinstance(part, Slot) and any(each.defines(type(part)) for each in _loaded.values())]
    return [part for number, part in enumerate(found) if part not in found[:number]]


def require(tree: Tree, where: object) -> None:
    """Raises ConfigError unless the plugins that a saved tree records under `plugins` are loaded, and the same."""
    named = tree.get("plugins") or {}
    if not isinstance(named, dict):
        raise ConfigError(f"{where}: its plugins must be names with hashes. Restore the file.")
    if not named.keys() <= _loaded.keys():
        load()
    for name, sha256 in named.items():
        known = _loaded.get(name)
        copies = [folder / COPIES / f"{name}.py" for folder in Path(str(where)).parents[:3]]
        copy = next((str(path) for path in copies if path.is_file()), None)
        if known is None:
            file = copy or f"{name}.py"
            remedy = f"Give its file, as in plugins={file} or, in Python, lm.config('plugins={file}'); or install its package"
            raise ConfigError(f"{where}: it needs the plugin {name!r} (SHA-256 {sha256}), and code is never taken from a config. {remedy}.")
        if sha256 not in (known.sha256, known.whole):
            which = f"the plugin {name!r} of SHA-256 {sha256}, and {known.origin} has {known.sha256}"
            file = "the file that it was made with" if copy is None else f"its copy, plugins={copy}"
            raise ConfigError(f"{where}: it needs {which}. Give {file}, or train anew under another run.name.")


def with_todays_hashes(named: Tree) -> Tree:
    """Returns recorded names with hashes, where those of loaded plugins leave out comments and blank lines."""
    return {name: known.sha256 if (known := _loaded.get(name)) and sha256 == known.whole else sha256 for name, sha256 in named.items()}


def _every_kind() -> Iterator[type[Slot]]:
    """The options of all slots."""
    for slot in Slot.__subclasses__():
        yield from slot._registry.values()


def _parts(value: Any) -> Iterator[Config]:
    """Every config within a value."""
    if isinstance(value, Config):
        yield value
        value = [getattr(value, name) for name in type(value).model_fields]
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _parts(part)


def _add(plugin: Plugin) -> None:
    known = _loaded.get(plugin.name)
    if known is not None and known.origin != plugin.origin:
        raise ConfigError(f"plugins: {known.origin} and {plugin.origin} are both named {plugin.name!r}. Rename one of them.")
    if not plugin.kinds:
        rule = 'it defines no kind: a class below a slot such as lm.kinds.NormConfig, with `kind: Literal["NAME"] = "NAME"`'
        raise ConfigError(f"plugins: {plugin.origin}: {rule}. Add one, or leave the file out.")
    _require_names_of_today(plugin)
    _loaded[plugin.name] = plugin


def _require_names_of_today(plugin: Plugin) -> None:
    """Raises ConfigError for a class with a name of `_RENAMED`, which would be silently ignored."""
    for kind in (each for each in vars(sys.modules[plugin.module]).values() if isinstance(each, type) and plugin.defines(each)):
        renamed = {old: new for base in kind.__mro__ for old, new in _RENAMED.get(base.__name__, {}).items()}
        for old in renamed.keys() & vars(kind).keys():
            _forget(plugin.module)
            rule = f"{kind.__name__}: {old} is called {renamed[old]} now, and would not be asked for. Rename it."
            raise ConfigError(f"plugins: {plugin.origin}: {rule}")


def _from_file(path: Path) -> Plugin:
    """Runs the bytes whose hash is taken, under a module name of their own."""
    if not path.is_file():
        raise ConfigError(f"plugins: {path} is no file. Give the Python file that defines your kinds.")
    name, module = path.stem, f"{_PACKAGE}.{path.stem}"
    if path.suffix != ".py" or not name.isidentifier():
        raise ConfigError(f"plugins: {path.name} must be named like a Python module, such as my_norm.py. Rename it.")
    with path.open("rb") as file:
        code = file.read(_MOST_BYTES)
    plugin = Plugin(name, str(path), module, _sha256(_bare(code)), _sha256(code), code)
    if _loaded.get(name) == plugin:
        return plugin
    package = sys.modules.setdefault(_PACKAGE, ModuleType(_PACKAGE))
    package.__path__ = []
    made = ModuleType(module)
    made.__file__ = str(path)
    sys.modules[module] = made
    _forget(module)  # a file that was edited need not have the same kinds
    try:
        exec(compile(code, str(path), "exec"), made.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module]
        _forget(module)
        raise _refusal(str(path), error) from error
    return plugin


def _forget(module: str) -> None:
    """Takes a module's kinds out of the options."""
    for slot in Slot.__subclasses__():
        slot._registry = {kind: found for kind, found in slot._registry.items() if found.__module__ != module}


def _installed(point: metadata.EntryPoint) -> Plugin:
    try:
        module = import_module(point.module)
    except (Exception, SystemExit) as error:
        raise _refusal(f"{point.name} ({GROUP} = {point.value})", error) from error
    file = Path(module.__file__ or "")
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    codes = {path.relative_to(file.parent).as_posix().encode() + b"\0": path.read_bytes() for path in files}
    bare, whole = b"".join(name + _bare(code) for name, code in codes.items()), b"".join(name + code for name, code in codes.items())
    return Plugin(point.name, point.value, point.module, _sha256(bare), _sha256(whole))


def _sha256(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()


def _bare(code: bytes) -> bytes:
    """The code without comments and blank lines; as it is where it is no Python."""
    code = code.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n").replace(b"\r", b"\n")  # all that Python takes for line ends
    try:
        tokens = list(tokenize.tokenize(io.BytesIO(code).readline))
        lines: list[str | None] = [*code.decode(tokens[0].string).split("\n")]
    except (SyntaxError, UnicodeError, LookupError, tokenize.TokenError):
        return code
    for token in tokens:
        row, column = token.start[0] - 1, token.start[1]
        line = lines[row] if row < len(lines) else None
        if line is not None and token.type == tokenize.COMMENT:
            lines[row] = line[:column].rstrip()
        elif line is not None and token.type == tokenize.NL and not line.strip():  # in a string of several lines there is no such token
            lines[row] = None
    return "\n".join(line for line in lines if line is not None).rstrip().encode()


def _refusal(origin: str, error: BaseException) -> ConfigError:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == origin]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = f"{origin}:{line}" if line else origin
    if isinstance(error, ConfigError):  # says what to do
        return ConfigError(f"plugins: {where}: {error}")
    said = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    remedy = "Mend the file."
    missing = (getattr(error, "name", None) or "").removeprefix(f"{_PACKAGE}.")  # of a relative import
    if isinstance(error, ModuleNotFoundError) and missing and "." not in missing:  # with a dot, a part of a package that is there
        beside = Path(origin).parent / missing
        own = beside.is_dir() or beside.with_suffix(".py").is_file()
        package = f"put the code of {beside.name} into it, or make both a package with an entry point of the group {GROUP}"
        remedy = f"A plugin is one file: {package}." if own else f"Install {beside.name}, or mend the file."
    return ConfigError(f"plugins: {where}: {' '.join(said.split())[:300].rstrip('.')}. {remedy}")
