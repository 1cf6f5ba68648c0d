"""Settings in words: type, range, default, value, description."""

import json
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic.fields import FieldInfo

from lm.schema import Config, entry_type, members, variants


def type_text(field: FieldInfo) -> str:
    """Returns a field's type in words, e.g. 'int > 0, or null', 'fp32 | bf16-mixed', 'list of text'."""
    entry = entry_type(field.annotation)
    if entry is not None:
        return f"{type_text(FieldInfo.from_annotation(entry))}, any number of them by name"
    kinds = variants(field.annotation)
    if kinds:
        return " | ".join(name or cls.__name__ for name, cls in kinds.items())
    parts = members(field.annotation)
    ranges = " and ".join(text for text in map(_range, field.metadata) if text)
    text = " or ".join(_name(part) for part in parts if part is not type(None))
    return text + (f" {ranges}" if ranges else "") + (", or null" if type(None) in parts else "")


def choices(field: FieldInfo) -> tuple[object, ...]:
    """Returns the values that a field's type lists, or its list's entries; () where it lists none."""
    parts = [inner for part in members(field.annotation) for inner in (get_args(part) if get_origin(part) is list else [part])]
    return tuple(value for part in parts if get_origin(part) is Literal for value in get_args(part))


def default_text(field: FieldInfo) -> str:
    """Returns the class default as it would be written in yaml; 'none, must be set' where there is none."""
    return "none, must be set" if field.is_required() else value_text(field.get_default(call_default_factory=True))


def value_text(value: Any) -> str:
    """Returns a value as it would be written on the command line."""
    if isinstance(value, Config):
        return value_text(value.tree())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=Config.tree)


def sentence(field: FieldInfo) -> str:
    """Returns a field's description on one line."""
    return " ".join((field.description or "").split())


def _name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(str(option) for option in get_args(annotation))
    if get_origin(annotation) is list:
        return f"list of {_name(members(get_args(annotation)[0])[0])}"
    return "text" if annotation is str else "true | false" if annotation is bool else getattr(annotation, "__name__", str(annotation))


def _range(rule: object) -> str:
    match rule:
        case Gt(bound):
            return f"> {bound}"
        case Ge(bound):
            return f">= {bound}"
        case Lt(bound):
            return f"< {bound}"
        case Le(bound):
            return f"<= {bound}"
        case MultipleOf(step):
            return f"a multiple of {step}"
        case _:
            pattern = getattr(rule, "pattern", None)
            return f"matching {pattern}" if pattern else ""
