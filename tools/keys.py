"""`make keys`: writes lm/cli/listing/keys.json, the fields of TrainConfig and of all that it may hold, for who must not import them."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from inspect import cleandoc
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen, MultipleOf
from pydantic.fields import FieldInfo

from lm.cli.listing.known import FILE, declared
from lm.schema import Config, Slot, Tree, members
from lm.training.config import TrainConfig
from tools.options import options

_PLAIN = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null"}


def listed(cls: type[Config]) -> list[Tree]:
    """Returns what `lm.cli.listing.known.made` makes this class of again: one entry a class, those that it needs before it."""
    entries: dict[type[Config], Tree] = {}
    slots: list[type[Slot]] = []
    _add(cls, entries, slots)
    for slot in slots:  # grows
        for _, kind in sorted(slot.kinds().items()):  # whichever module was imported first
            if kind.__module__.split(".")[0] == slot.__module__.split(".")[0]:  # and of no plugin
                _add(kind, entries, slots)
    ordered = [entry for other, entry in entries.items() if other is not cls] + [entries[cls]]
    names = [entry["name"] for entry in ordered]
    assert len(set(names)) == len(names), names
    return ordered


def _add(cls: type[Config], entries: dict[type[Config], Tree], slots: list[type[Slot]]) -> None:
    if cls in entries or cls in (Config, Slot):
        return
    is_abstract = issubclass(cls, Slot) and "kind" not in cls.model_fields
    base = next((up for up in cls.__mro__[1:] if issubclass(up, Slot) and "kind" not in up.model_fields), Config)
    _add(base, entries, slots)
    fields = {} if is_abstract else {name: _field(field, entries, slots) for name, field in cls.model_fields.items()}
    entries[cls] = {"name": cls.__name__, "of": base.__name__, "doc": cls.__doc__ and cleandoc(cls.__doc__), "fields": fields}
    if issubclass(cls, Slot) and base is Slot:
        entries[cls]["group"] = cls.group
        slots.append(cls)


def _field(field: FieldInfo, entries: dict[type[Config], Tree], slots: list[type[Slot]]) -> Tree:
    told = {"type": _type(field.annotation, entries, slots), "rules": _rules(field.metadata), "doc": field.description}
    if field.is_required():
        return told
    default = field.get_default(call_default_factory=True)
    return told | {"default": json.loads(json.dumps(default, default=Config.tree))}


def _type(annotation: Any, entries: dict[type[Config], Tree], slots: list[type[Slot]]) -> Any:
    """The name of a class or of a plain type, or one word for what is made of others, and these."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        rules = _rules([each for info in metadata for each in (info.metadata if isinstance(info, FieldInfo) else [info])])
        told = _type(inner, entries, slots)
        return {"ruled": {"type": told, "rules": rules}} if rules else told
    if get_origin(annotation) in (list, dict):
        return {get_origin(annotation).__name__: _type(get_args(annotation)[-1], entries, slots)}
    if get_origin(annotation) is Literal:
        return {"one of": list(get_args(annotation))}
    if isinstance(annotation, type) and issubclass(annotation, Config):
        _add(annotation, entries, slots)
        return annotation.__name__
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    parts = get_args(annotation)
    assert len(members(annotation)) > 1, annotation
    return {"any of": [_type(part, entries, slots) for part in parts]}


def _rules(metadata: Sequence[Any]) -> Tree:
    """The arguments of pydantic's Field that say the same. A key that names its kind is seen to by the dict that it is in."""
    rules: Tree = {}
    for rule in metadata:
        match rule:
            case Gt() | Ge() | Lt() | Le() | MinLen() | MultipleOf():
                rules |= asdict(rule)
            case _ if isinstance(getattr(rule, "pattern", None), str):
                rules["pattern"] = rule.pattern
            case _:
                assert re.match("BeforeValidator.func=<function kind_from_key", str(rule)), rule
    return rules


if __name__ == "__main__":
    options(sys.argv[1:], __doc__, {})
    classes = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in listed(TrainConfig))
    FILE.write_text(f'{{"declared": "{declared()}", "classes": [\n{classes}\n]}}\n', encoding="utf-8")
