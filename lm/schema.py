"""Plain trees (from yaml, the command line, or a checkpoint) become frozen, strictly checked configs, with errors a user can act on."""

import json
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError, core_schema

from lm.errors import ConfigError
from lm.spelling import did_you_mean, first_sentence

Tree = dict[str, Any]
MOST = 1 << 24
"""The largest size of anything that a config builds: a width, a length, a count of tokens."""
MOST_LAYERS = 1 << 12


def flatten(tree: Tree, prefix: str = "") -> Tree:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists and empty trees are leaves."""
    flat: Tree = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def nest(leaves: Tree) -> Tree:
    """The tree of dotted paths."""
    tree: Tree = {}
    for path, value in leaves.items():
        *parents, last = path.split(".")
        section = tree
        for key in parents:
            if not isinstance(section.get(key), dict):  # not there yet, or null
                section[key] = {}
            section = section[key]
        if value != {} or not isinstance(section.get(last), dict):  # an empty section changes nothing, and becomes a new one, filled here
            section[last] = value or {} if isinstance(value, dict) else value
    return tree


MaybeEmpty = Annotated[str, Field(min_length=0)]
"""A text that may be empty, such as a prompt; no other may."""


class Config(BaseModel):
    """Base of every config: strict types, no unknown keys, no empty text, no number that tensors do not hold, immutable. A string under a
    field documents it."""

    other_names: ClassVar[dict[str, str]] = {}
    """An option, or option=value -> what other programs call it, for those who write that."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        str_min_length=1,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    def __init__(self, **values: Any) -> None:
        """Raises ConfigError, as `from_tree`."""
        if messages := [f"{path.rstrip('_')}: {rule}" for path, rule in _unfit_leaves(values)]:
            raise _joined(messages, "")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _refusal(type(self), values, error) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested configs are validated without it, as those of pydantic

    def tree(self) -> Tree:
        """Every value, defaults included, as plain JSON types: what is saved, so that a changed default never changes an old run."""
        return self.model_dump(mode="json")

    def replace(self, **changes: Any) -> Self:
        """A checked copy with some fields changed; `model_copy(update=...)` would skip validation."""
        plain = {key: value.tree() if isinstance(value, Config) else value for key, value in changes.items()}
        return from_tree(type(self), self.tree() | plain)


class Slot(Config):
    """Base of the configs of one slot. A direct subclass is the slot and says what all of its kinds answer; each class below it that has
    a `kind` is one of its options, from the moment it is defined, and is found by that tag when a tree is validated.

        class NormConfig(Slot, group="model/norm"): ...
        class RMSNormConfig(NormConfig):
            kind: Literal["rms"] = "rms"
    """

    _registry: ClassVar[dict[str, type["Slot"]]]
    group: ClassVar[str | None] = None
    """The folder of conf/ that holds an option for each kind; None where the kinds are chosen by other means."""

    if TYPE_CHECKING:
        kind: str

    def __init_subclass__(cls, group: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Slot in cls.__bases__:
            cls._registry, cls.group = {}, group

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if (kind := cls.model_fields.get("kind")) is None:
            return
        if not isinstance(kind.default, str) or kind.default not in (get_args(kind.annotation) or [kind.default]):
            raise ConfigError(f'{cls.__name__}: its kind must have its one text as its default. Write kind: Literal["NAME"] = "NAME".')
        known = cls._registry.get(kind.default)
        if known is not None and (known.__module__, known.__name__) != (cls.__module__, cls.__name__):
            raise ConfigError(f"{cls.__name__}: a kind '{kind.default}' is in {_origin(known)} already. Give yours another name.")
        cls._registry[kind.default] = cls

    @classmethod
    def kinds(cls) -> dict[str, type[Self]]:
        """Returns the options below this class, by kind."""
        return {kind: found for kind, found in cls._registry.items() if issubclass(found, cls)}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """A kind is validated as any config; the slot, or a part of it, as the kind that the tree names."""
        if "kind" in cls.model_fields or Config in cls.__bases__:
            return handler(source)
        tree = core_schema.plain_serializer_function_ser_schema(lambda value: value.tree())
        return core_schema.no_info_plain_validator_function(cls._chosen, serialization=tree)

    @classmethod
    def _chosen(cls, value: Any) -> Self:
        if isinstance(value, cls):
            return value
        kinds, kind = cls.kinds(), value.get("kind") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise PydanticKnownError("union_tag_invalid", {"discriminator": "'kind'", "tag": str(kind), "expected_tags": ", ".join(kinds)})
        if missing := ", ".join(sorted(kinds[kind].__abstractmethods__)):
            where = f"Define it in {kinds[kind].__name__}"
            raise ValueError(f"kind={kind} does not define {missing}, which every kind of its slot must. {where}.")
        return kinds[kind].model_validate_json(json.dumps(value), strict=True)


def kind_from_key(values: Any) -> Any:
    """{"mine": {}} -> {"mine": {"kind": "mine"}}: in a dict of slots, a value without a kind takes its key as its kind."""
    if not isinstance(values, dict):
        return values
    return {key: {"kind": key, **value} if isinstance(value, dict) else value for key, value in values.items()}


def _origin(cls: type) -> str:
    """The file that defines a class, or else its module."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__


_LENGTHS = ("string_too_short", "too_short")
C = TypeVar("C", bound="Config")
S = TypeVar("S", bound="Slot")
Named = Annotated[dict[str, S], BeforeValidator(kind_from_key)]
"""Any number of options of one slot, each under a name of its own: callbacks.mine.every=10."""


def from_tree(cls: type[C], tree: Tree, where: str = "") -> C:
    """Validate a plain tree into `cls`; `where` (a file, say) starts each message. Raises ConfigError, the first problem last."""
    if messages := [f"{path.rstrip('_')}: {rule}" for path, rule in _unfit_leaves(tree)]:
        raise _joined(messages, where)
    try:
        return cls.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise _refusal(cls, tree, error, where) from None


def _refusal(cls: type[Config], tree: Tree, error: ValidationError, where: str = "") -> ConfigError:
    """What pydantic found, in our words; of the parts of a union that a value does not fit, one."""
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] not in _LENGTHS)
    explained = [_explain(cls, tree, dict(problem)) for problem in problems]
    return _joined(list({message.partition(":")[0]: message for message in reversed(explained)}.values())[::-1], where)


def _joined(messages: list[str], where: str) -> ConfigError:
    first, *others = [(f"{where}: " if where else "") + message for message in messages]
    return ConfigError(first, before=others[::-1])


def _unfit_leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, what is wrong) of numbers that tensors cannot hold, and of texts that files cannot."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _unfit_leaves(each, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield path, f"a number of {value.bit_length()} bits does not fit. The value must be one that 64 bits hold."
    elif isinstance(value, float) and 3.4e38 < abs(value) < float("inf"):
        yield path, f"{value} does not fit. The value must be one that float32 holds, up to 3.4e38."
    elif isinstance(value, str) and not value.isascii() and re.search("[\ud800-\udfff]", value):
        yield path, f"{value[:80]!r} does not fit. The value must be text in UTF-8. Rename what it names, or set PYTHONUTF8=1."


def variants(annotation: Any) -> dict[str, type[Config]]:
    """Returns the options of a slot by `kind`; a single one under "" where the annotation is a kind or a plain config; none for a leaf."""
    found: dict[str, type[Config]] = {}
    for member in members(annotation):
        if isinstance(member, type) and issubclass(member, Slot) and "kind" not in member.model_fields:
            found |= member.kinds()
        elif isinstance(member, type) and issubclass(member, Config):
            found[""] = member
    return found


def variant(annotation: Any, tree: Any) -> type[Config] | None:
    """The config class that `tree` means under this annotation, by its `kind`; None for a leaf or an unknown kind."""
    options = variants(annotation)
    return options.get("") or options.get(str(tree.get("kind") if isinstance(tree, dict) else None))


def find_field(cls: type[Config], tree: Tree, path: Iterable[str]) -> tuple[type[Config], FieldInfo | None]:
    """The config class that holds the last key of `path`, and that field; None where there is no such field. In a dict of slots any name
    is one."""
    owner, field, value = cls, None, tree  # type: type[Config], FieldInfo | None, Any
    for key in path:
        entry = entry_type(field.annotation) if field is not None else None
        if isinstance(value, list) and key.isdigit():
            inside = next((get_args(one)[0] for one in members(field.annotation) if get_origin(one) is list), Any) if field else Any
            field, value = FieldInfo.from_annotation(inside), value[int(key)] if int(key) < len(value) else None
            continue
        if entry is not None:
            field, value = FieldInfo.from_annotation(entry), kind_from_key({key: {}} | value if isinstance(value, dict) else {key: {}})
        else:
            inner = variant(field.annotation, value) if field is not None else cls
            field = inner.model_fields.get(key) if inner is not None else None
            owner = inner or owner
        if field is None:
            return owner, None
        value = value.get(key) if isinstance(value, dict) else None
    return owner, field


def entry_type(annotation: Any) -> Any:
    """V of dict[str, V]; None for all else."""
    return get_args(annotation)[1] if get_origin(annotation) is dict else None


def members(annotation: Any) -> list[Any]:
    """The parts of a union, or the annotation alone."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [leaf for member in get_args(annotation) for leaf in members(member)]
    return [annotation]


def _path(cls: type[Config], tree: Tree, loc: Iterable[str | int]) -> list[str]:
    """The keys of a place, without the names that pydantic gives to the members of a union."""
    path: list[str] = []
    value: Any = tree
    for part in loc:
        there = isinstance(value, dict) and part in value
        if there or isinstance(part, int) or find_field(cls, tree, [*path, part])[1] is not None:
            path.append(str(part))
            value = value[part] if there or (isinstance(value, list) and isinstance(part, int) and part < len(value)) else None
    return path


def _by_group(options: dict[str, type[Config]]) -> str:
    """Where the slot has a folder in conf/, its options have other names than kinds: swiglu is a kind=mlp."""
    group = next((kind.group for kind in options.values() if issubclass(kind, Slot)), None)
    shell, python = f"{group}=NAME", f"lm.config(overrides=['{group}=NAME']).{str(group).replace('/', '.')}"
    return f" What {shell} chooses in a shell is {python}." if group is not None else ""


def _explain(cls: type[Config], tree: Tree, problem: dict[str, Any]) -> str:
    path = _path(cls, tree, problem["loc"])
    owner, field = find_field(cls, tree, path)
    where, kind, given = ".".join(path) or "config", problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        return f"{where}: there is no such key. {did_you_mean(path[-1], owner.model_fields, owner.other_names)}"
    if kind == "missing":
        kinds = [name for name in variants(field.annotation) if name] if field else []
        one = f"Set its kind, one of {', '.join(kinds)}, as in {path[-1]}={{'kind': '{kinds[0]}'}}" if kinds else "Set it"
        what = f" ({first_sentence(field.description)})" if field is not None and field.description and not kinds else ""
        return f"{where}: a value is missing{what}. {one}."
    if kind == "union_tag_invalid":
        options, tag = variants(field.annotation) if field else {}, str(given.get("kind") if isinstance(given, dict) else given)[:80]
        if isinstance(given, str) and given in options:
            return f"{where}: {tag!r} is a text. Write {path[-1]}={{'kind': {tag!r}}}."
        return f"{where}.kind: {tag!r} is not an option. {did_you_mean(tag, options)}{_by_group(options)}"
    if kind in ("literal_error", "bool_type"):
        choices = ["true", "false"] if kind == "bool_type" else re.split(", | or ", problem["ctx"]["expected"].replace("'", ""))
        return f"{where}: {str(given)[:80]!r} is not an option. {did_you_mean(str(given)[:80], choices)}"
    if kind in ("value_error", "assertion_error"):
        return f"{where}: {problem['ctx']['error']}"
    if kind in _LENGTHS:
        return f"{where}: {given!r} is empty. Write something, or leave it out."
    rule = problem["msg"].removeprefix("Input should be ").rstrip(".").replace("a valid array", "a list, such as [a,b]")
    if kind in ("int_type", "int_from_float") and isinstance(given, float) and given.is_integer() and abs(given) < 2**63:
        rule += f": write {int(given)}"
    rule += ", or null" * (given == "None" and field is not None and type(None) in members(field.annotation))
    shown = json.dumps(given, default=repr)[:80] if not isinstance(given, str) else repr(given[:80])
    return f"{where}: {shown} does not fit. The value must be {rule}."
