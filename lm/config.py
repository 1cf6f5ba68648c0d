"""Plain trees (from yaml, the command line, or a checkpoint) become frozen, strictly checked configs, with errors a user can act on."""

import difflib
import json
import types
from collections.abc import Iterable
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from lm.errors import ConfigError

Tree = dict[str, Any]


class Config(BaseModel):
    """Base of every config: strict types, no unknown keys, no NaN or infinity, immutable. A string under a field documents it."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )

    def tree(self) -> Tree:
        """Every value, defaults included, as plain JSON types: what is saved, so that a changed default never changes an old run."""
        return self.model_dump(mode="json")

    def replace(self, **changes: Any) -> Self:
        """A checked copy with some fields changed; `model_copy(update=...)` would skip validation."""
        return from_tree(type(self), {**self.tree(), **Config._plain(changes)})

    @staticmethod
    def _plain(values: Tree) -> Tree:
        return {key: value.tree() if isinstance(value, Config) else value for key, value in values.items()}


C = TypeVar("C", bound="Config")


def from_tree(cls: type[C], tree: Tree, where: str = "") -> C:
    """Validate a plain tree into `cls`; `where` (a file, say) starts each message. Raises ConfigError, the first problem last."""
    try:
        return cls.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        messages = [_explain(cls, tree, dict(problem)) for problem in error.errors(include_url=False)]
    raise ConfigError("\n".join((f"{where}: " if where else "") + message for message in reversed(messages)))


def variants(annotation: Any) -> dict[str, type[Config]]:
    """The members of a tagged union by `kind`; one member for a plain config; none for a leaf."""
    found: dict[str, type[Config]] = {}
    for member in members(annotation):
        if isinstance(member, type) and issubclass(member, Config):
            kind = member.model_fields.get("kind")
            found[str(kind.default) if kind else ""] = member
    return found


def variant(annotation: Any, tree: Any) -> type[Config] | None:
    """The config class that `tree` means under this annotation, by its `kind`; None for a leaf or an unknown kind."""
    options = variants(annotation)
    if len(options) == 1:
        return next(iter(options.values()))
    return options.get(str(tree.get("kind"))) if isinstance(tree, dict) else None


def find_field(cls: type[Config], tree: Tree, path: Iterable[str]) -> tuple[type[Config], FieldInfo | None]:
    """The config class that holds the last key of `path`, and that field; None where there is no such field."""
    owner, field, value = cls, None, tree  # type: type[Config], FieldInfo | None, Any
    for key in path:
        if field is not None:
            inner = variant(_annotation(field), value)
            if inner is None:
                return owner, None
            owner = inner
        field = owner.model_fields.get(key)
        if field is None:
            return owner, None
        value = value.get(key) if isinstance(value, dict) else None
    return owner, field


def did_you_mean(given: str, options: Iterable[str]) -> str:
    """' Did you mean 'x'?' where something is near, then all options, nearest first."""
    ranked = sorted(options, key=lambda option: -difflib.SequenceMatcher(None, given, option).ratio())
    near = difflib.get_close_matches(given, ranked, n=1, cutoff=0.6)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    return f"{hint}Options: {', '.join(ranked)}." if ranked else "There are none."


def _annotation(field: FieldInfo) -> Any:
    return Annotated[field.annotation, field.discriminator] if field.discriminator else field.annotation


def members(annotation: Any) -> list[Any]:
    """The parts of a union, or the annotation alone."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [leaf for member in get_args(annotation) for leaf in members(member)]
    return [annotation]


def _path_in_tree(tree: Any, loc: tuple[Any, ...], of_section: bool) -> list[str]:
    """pydantic's location without the union tags it inserts: a part that is the `kind` of the dict at hand and no key of it.

    of_section: the error is a section's as a whole, so that even the last part may be a tag.
    """
    path: list[str] = []
    for position, part in enumerate(loc):
        is_tag = isinstance(tree, dict) and part not in tree and tree.get("kind") == part and (of_section or position < len(loc) - 1)
        if is_tag:
            continue
        path.append(str(part))
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
    return path


def _explain(cls: type[Config], tree: Tree, problem: dict[str, Any]) -> str:
    path = _path_in_tree(tree, problem["loc"], problem["type"] in ("value_error", "assertion_error"))
    where, kind, given = ".".join(path) or "config", problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        owner, _ = find_field(cls, tree, path)
        return f"{where}: there is no such key. {did_you_mean(path[-1], owner.model_fields)}"
    if kind == "missing":
        return f"{where}: a value is missing. Set it."
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        _, field = find_field(cls, tree, path)
        options = variants(_annotation(field)) if field else {}
        tag = given.get("kind") if isinstance(given, dict) else given
        return f"{where}.kind: {tag!r} is not an option. {did_you_mean(str(tag), options)}"
    if kind == "literal_error":
        _, field = find_field(cls, tree, path)
        choices = [str(o) for member in members(field.annotation) for o in get_args(member)] if field else []
        return f"{where}: {given!r} is not an option. {did_you_mean(str(given), choices)}"
    if kind in ("value_error", "assertion_error"):
        return f"{where}: {problem['ctx']['error']}"
    rule = problem["msg"].removeprefix("Input should be ").rstrip(".")
    shown = json.dumps(given)[:80] if not isinstance(given, str) else repr(given[:80])
    return f"{where}: {shown} does not fit. The value must be {rule}."
