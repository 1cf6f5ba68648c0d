"""`lm explain PATH [overrides]`: what a setting means, what it may be, and where its value comes from."""

from pydantic.fields import FieldInfo

from lm.cli.compose import catalog
from lm.cli.compose.arguments import overrides_of
from lm.cli.compose.compose import compose
from lm.cli.compose.keys import at, check_key, choosing, fields
from lm.cli.compose.layers import Composition
from lm.cli.listing import known
from lm.cli.verb import Verb
from lm.cli.views.text import choices, default_text, sentence, type_text, value_text
from lm.errors import ConfigError
from lm.printing import answer, note
from lm.schema import Config, find_field, variant, variants
from lm.units import table


class Explain(Verb):
    """usage: lm explain [PATH] [overrides of lm train]

    Says what a setting means, what it may be, and where its value comes from. If the chosen kind lacks the key, one that has it is taken.
    In place of a setting's path, its value will do where no other setting has one of that name.

    lm explain model.attention.n_kv_heads                 description, type, default, and where the value comes from
    lm explain optim optim=adamw                          every key of a section
    lm explain swiglu                                     the same as model/ffn model/ffn=swiglu
    lm explain trainer.max_steps recipes=ablation/ffn     the same under a recipe or an override
    """

    words = None
    takes = None

    def run(self, rest: list[str]) -> None:
        """Prints one setting, one section, or all sections."""
        paths = [arg for arg in rest if "=" not in arg and not arg.startswith(("~", "-"))]
        if len(paths) > 1:
            raise ConfigError(f"explain: {len(paths)} settings were given ({', '.join(paths)}). Ask for one at a time.")
        path = paths[0].replace("/", ".") if paths else ""
        overrides = overrides_of([arg for arg in rest if arg not in paths])
        if path and "." not in path and path not in known.root().model_fields:
            path, overrides = _of_value(path, overrides)
        composition = _with_key(path, overrides)
        composition.tell()
        if not path:
            answer(_section(composition, "", known.root()))
            return
        field = check_key(path, composition.tree)
        value = composition.section(path)
        section = None if isinstance(value, int) else variant(field.annotation, value)
        answer(_section(composition, path, section) if section else _setting(composition, path, field))


def _of_value(word: str, overrides: list[str]) -> tuple[str, list[str]]:
    """Returns the path of the one setting that has an option or value of this name, and the overrides with it; both as given where none
    has. Raises ConfigError where several have."""
    tree = compose(overrides).tree
    found = {group: word for group, options in catalog.groups().items() if word in options and group not in catalog.GLOBAL}
    found |= {
        key: f"[{word}]" if type_text(field).startswith("list") else word
        for key, field in fields(known.root(), tree)
        if word in choices(field)
    }
    if len(found) > 1:
        first = next(iter(found))
        raise ConfigError(f"explain: {word} is a value of {' and '.join(found)}. Write lm explain {first} {first}={found[first]}.")
    if not found:
        return word, overrides
    [(key, value)] = found.items()
    note(f"{word}: {key}={value} is taken.")
    return key.replace("/", "."), [*overrides, f"{key}={value}"]


def _with_key(path: str, overrides: list[str]) -> Composition:
    """Returns what the overrides compose, with a kind that has this key wherever they do not choose one."""
    composition, given = compose(overrides), {each.partition("=")[0] for each in overrides}
    if path and (chosen := choosing(path, composition.tree)) and chosen.partition("=")[0] not in given:
        note(f"{path}: {chosen} is taken, which has this key.")
        return _with_key(path, [*overrides, chosen])
    return composition


def _setting(composition: Composition, path: str, field: FieldInfo) -> str:
    *instead, last = _history(composition, path, field)
    section, _, key = path.rpartition(".")
    about = sentence(field)
    if key == "kind":
        about = f"Which kind {section} is: {', '.join(sorted(variants(check_key(section, composition.tree).annotation)))}."
    default = [] if field.is_required() else [("default", default_text(field))]
    rows = [("type", type_text(field)), *default, ("value", last[1]), ("from", _from(last))]
    earlier = [("instead of", f"{value}  ({label}, {source})") for label, value, source in reversed(instead)]
    return "\n".join([path, f"  {about}", "", table([*rows, *earlier])])


def _history(composition: Composition, path: str, field: FieldInfo) -> list[tuple[str, str, str]]:
    """Returns (layer, value, source) for each place that sets a setting, weakest first: the last one wins."""
    said = [(layer.label, value_text(value), layer.source or f"{path}=") for layer, value in composition.stated(path)]
    if not field.is_required():
        owner, _ = find_field(known.root(), composition.tree, path.split("."))
        return [("class default", default_text(field), owner.__name__), *said]
    section, _, _ = path.rpartition(".")
    if not said and section and isinstance((whole := check_key(section, composition.tree)).default, int):  # one number for all its keys
        return _history(composition, section, whole)
    return said or [("nowhere yet", default_text(field), f"set {path}=...")]


def _from(entry: tuple[str, str, str]) -> str:
    label, value, source = entry
    return f"{label}, {source}{value if source.endswith('=') else ''}"


def _section(composition: Composition, path: str, cls: type[Config]) -> str:
    group = path.replace(".", "/")
    lines = [path, f"  {' '.join((cls.__doc__ or '').split())}"] if path else []
    if group in catalog.groups():
        lines.append(f"  {group}={composition.chosen(group)}; options: {', '.join(catalog.groups()[group])}")
    tree = composition.tree
    section = at(tree, path.split(".")) if path else tree
    rows = []
    for name, field in fields(cls, section if isinstance(section, dict) else {}, f"{path}." if path else ""):
        label, value, _ = _history(composition, name, field)[-1]
        rows.append((name, value, label, sentence(field)))
    return "\n".join([*lines, "", table(rows)] if lines else [table(rows)])
