"""Files and overrides become one TrainConfig, with the source of every value.

Hydra resolves the option of each group. Layers of values are then merged here, weakest first: train.yaml, the options' files, the model
preset, the recipe, debug, the command line. A preset or recipe refines the options that it chose itself; where another option is chosen
from outside, its values for that section are kept only for keys that the new option does not set and the option's kind has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lm import plugins
from lm.cli.compose import catalog
from lm.cli.compose.choices import Choices, choices_of
from lm.cli.compose.finetune import SPECIALS, gentle_choices, gentle_source, gentle_values, parent_of, parent_values, with_one_parent
from lm.cli.compose.keys import at, check_key, check_section, chosen_as_value, of_another_kind, require_section
from lm.cli.compose.layers import SPOKEN, Composition, Layer, merged, shorter_warmup
from lm.cli.compose.naming import run_name
from lm.cli.compose.overrides import Given, parse
from lm.cli.compose.quoting import as_text
from lm.cli.listing import known
from lm.errors import ConfigError
from lm.schema import Tree, find_field, flatten
from lm.spelling import below, did_you_mean

if TYPE_CHECKING:
    from lm.training.config import TrainConfig


def compose_config(overrides: Sequence[str], recipe: str | None = None) -> "TrainConfig":
    """Returns a TrainConfig; see `lm.config`, which calls this."""
    overrides = plugins.take(overrides)
    if recipe is not None:
        groups = [group for group in ("recipes", "model") if recipe in catalog.groups()[group]]
        if not groups:
            hint = did_you_mean(recipe, [*catalog.groups()["recipes"], *catalog.groups()["model"]])
            raise ConfigError(f"config: {recipe!r} is neither a recipe nor a model preset. {hint}")
        overrides = [f"{groups[0]}={recipe}", *overrides]
    composition = compose(overrides)
    composition.keep_past()
    found = composition.config()
    composition.tell()
    return found


def compose(overrides: Sequence[str], saved: Layer | None = None) -> Composition:
    """Composes overrides. Raises ConfigError for a key, group or option that does not exist; `config()` checks the values.

    saved: a run's values, used for all sections that the command line chooses no option for, instead of files and default recipe.
    """
    given = with_one_parent(parse(overrides))
    for item in given:
        if not item.is_group:
            check_section(item.key)  # a mistyped section is reported before anything is composed
    chosen = {item.key: item.value for item in given if item.is_group}
    choices = choices_of(chosen)
    recipe, parent = choices["recipes"], parent_of(choices["recipes"], given)
    gentle: Choices = {}
    if parent is not None and saved is None:
        gentle = gentle_choices(recipe, chosen, "objective" in _switched(choices, chosen))
        choices = choices_of(chosen | gentle)
    layers, notes = _file_layers(choices, _switched(choices, chosen | gentle))
    _refuse_unknown(layers)
    if saved is not None:
        layers, notes = [_without(saved, chosen), *_of_sections(layers, {key.split("/")[0] for key in chosen})], []
    if gentle:
        layers.insert(-1, Layer("fine-tuning", catalog.shown(gentle_source()), gentle_values(gentle, choices)))
        notes = [note for note in notes if note.partition("=")[0] not in gentle]
    if parent is not None:
        layers = _with_parent(layers, parent, given, recipe)
    spoken = Layer(SPOKEN, "", {})
    for item in sorted(given, key=lambda item: not item.key.endswith(".kind")):  # a kind before its keys
        if not item.is_group:
            apply(item, layers, spoken)
        elif item.value is None:
            _forget(item.key.replace("/", "."), layers)
    if saved is None and (short := shorter_warmup([*layers, spoken])) is not None:
        layers.append(short)
        notes = [*notes, short.told()]
    if "run.name" not in spoken.values:
        named = [layer for layer in layers if "run.name" in layer.values and saved is None]
        notes += [f"run.name: left out {layer.values['run.name']} ({layer.source}); runs are named after what they do" for layer in named]
        layers.append(Layer("derived from recipe and overrides", "", {"run.name": run_name(given)}))
    found = Composition([*layers, spoken], choices, notes)
    if parent is not None and saved is None:
        found.notes += _of_parent(found, parent, gentle)
    return found


def _of_parent(found: Composition, parent: str, gentle: Mapping[str, str | None]) -> list[str]:
    """Returns a note on values of a fine-tuning run that come neither from its recipe nor from the command line; [] if there are none."""
    taken = [f"{group}={option}" for group, option in gentle.items()]
    for layer in found.layers:
        if layer.label in ("fine-tuning", "checkpoint"):
            own = _without_parents(layer.values)
            taken += [f"{path}={value}" for path, value in own.items() if found.stated(path)[-1][0] is layer]
    if not taken:
        return []
    return [f"init_from={parent}: {' '.join(taken)}, for objective={found.choices['objective']} from here; say another to have it"]


def _without_parents(values: Tree) -> Tree:
    """Returns the values without those of the sections that a checkpoint brings along."""
    return {path: value for path, value in values.items() if not below(path, ("model", "tokenizer"))}


def _without(saved: Layer, chosen: Mapping[str, str | None]) -> Layer:
    """Returns the saved values except those of sections that an option was chosen for."""
    gone = [group.replace("/", ".") for group in chosen]
    return replace(saved, values={path: value for path, value in saved.values.items() if not below(path, gone)})


def _of_sections(layers: list[Layer], sections: set[str]) -> list[Layer]:
    """Returns the files' values for these sections; with `recipes` among them, all values of the recipe too."""
    recipe = "recipes" in sections
    return [
        replace(layer, values={path: value for path, value in layer.values.items() if recipe or path.split(".")[0] in sections})
        for layer in layers
        if recipe or layer.label != "recipe"
    ]


def _with_parent(layers: list[Layer], parent: str, given: Sequence[Given], recipe: str | None) -> list[Layer]:
    """Returns the layers with the checkpoint's model and tokenizer instead of the files', and data.seq_len within its context."""
    for layer in layers:
        added = {SPECIALS: layer.values[SPECIALS]} if {SPECIALS, "init_from"} <= layer.values.keys() else {}  # of a recipe for fine-tuning
        layer.values = _without_parents(layer.values) | added
    said = [layer.values[SPECIALS] for layer in layers if SPECIALS in layer.values]
    values = parent_values(parent, given, recipe, (said or [None])[-1])
    tree = merged(layers)
    if "adapter.whole" in values and ("adapter" not in tree or at(tree, ["adapter", "whole"]) is not None):
        del values["adapter.whole"]
    context, rows = values.get("model.max_seq_len"), at(tree, ["data", "seq_len"])
    if isinstance(context, int) and isinstance(rows, int) and rows > context:
        values["data.seq_len"] = context
    return [*layers, Layer("checkpoint", parent, values)]


def _switched(choices: Choices, chosen: Mapping[str, str | None]) -> set[str]:
    """Returns the groups whose option differs from the recipe's choice or, for slots, from the model preset's."""
    named = {group: option for group, option in chosen.items() if group == "recipes"}
    asked = choices_of(named) if len(chosen) > len(named) else choices
    slots = catalog.preset_slots(str(choices["model"]))
    return {group for group, option in choices.items() if option != slots.get(group, asked[group])}


def _file_layers(choices: Choices, switched: set[str]) -> tuple[list[Layer], list[str]]:
    plain = [group for group in choices if group not in ("model", *catalog.GLOBAL)]
    layers = [_train_layer()]
    layers += [
        _file_layer("option", group, name) for group in plain if (option := choices[group]) for name in catalog.lineage(group, option)
    ]
    open_to_refinement = [_file_layer("preset", "model", name) for name in catalog.lineage("model", str(choices["model"]))]
    open_to_refinement += [_file_layer("recipe", "recipes", name) for name in catalog.lineage("recipes", str(choices["recipes"]))]
    tree = merged([*open_to_refinement, *layers])
    notes = []
    for layer in open_to_refinement:
        for group in sorted(switched & set(plain)):
            note = leave_out(layer, group, choices[group], tree)
            notes += [note] if note else []
    return [*layers, *open_to_refinement, _file_layer("debug", "debug", choices["debug"])], notes


def _train_layer() -> Layer:
    file = catalog.train_file()
    return Layer("conf", catalog.shown(file), {path: value for path, value in flatten(catalog.read(file)).items() if path != "defaults"})


def _file_layer(label: str, group: str, option: str | None) -> Layer:
    if option is None:
        return Layer(label, "", {})
    return Layer(label, catalog.source(group, option), catalog.values(group, option))


def leave_out(layer: Layer, group: str, option: str | None, tree: Tree) -> str:
    """Removes from a preset's or recipe's layer the values meant for another option of this group; returns a note on them."""
    section, own = group.replace("/", "."), catalog.with_inherited(group, option)
    left_out = {}
    for path in [path for path in layer.values if path.startswith(f"{section}.")]:
        if path in own or of_another_kind(path, section, tree):
            left_out[path] = layer.values.pop(path)
    what = ", ".join(f"{path}={value}" for path, value in left_out.items())
    return f"{group}={option or 'null'}: left out {what} ({layer.source}), which was meant for another option" if what else ""


def _refuse_unknown(layers: list[Layer]) -> None:
    tree = merged(layers)
    for layer in layers:
        for path, value in layer.values.items():
            try:
                require_section(path, check_key(path, tree), value)
            except ConfigError as error:
                source, said = layer.source, str(error)
                for other in (other for other in layers if other.label in ("preset", "recipe", "debug")):  # the strongest last
                    kinds = other is not layer and other.label != "preset"  # a preset may say its own
                    if (found := chosen_as_value(path, other.values, kinds)) is not None:
                        source, said = other.source, found
                raise ConfigError(f"{source}: {said}") from error


def apply(item: Given, layers: list[Layer], spoken: Layer) -> None:
    """Applies one command-line override on top of the files' layers."""
    if item.is_delete:
        check_key(item.key, merged([*layers, spoken]))
        _forget(item.key, [*layers, spoken])
        return
    if item.key.split(".")[-1] == "kind" and (group := item.key.removesuffix(".kind").replace(".", "/")) in catalog.groups():
        chosen = " or ".join(catalog.options_of_kind(group, item.raw)) or item.raw
        raise ConfigError(f"{item.key}: the kind comes with the option. Write {group}={chosen}.")
    _, leaf = find_field(known.root(), merged([*layers, spoken]), item.key.split("."))
    value = item.value if leaf is None else as_text(leaf, item.raw, item.value)
    leaves = flatten(value, f"{item.key}.") if isinstance(value, dict) and value else {item.key: value}
    for path in [path for path in leaves if path.endswith(".kind")]:  # decides which other keys exist
        _forget(path.removesuffix(".kind"), layers)
        spoken.values[path] = leaves[path]
    tree = merged([*layers, spoken])
    field = check_key(item.key, tree)
    if item.key == "seed":  # overrides all single seeds
        for layer in [*layers, spoken]:
            layer.values = {path: value for path, value in layer.values.items() if not path.startswith("seed.")}
    require_section(item.key, field, value, item.raw)
    for path in leaves:
        check_key(path, tree)
    if value == {}:  # here it empties what files have there
        _forget(item.key, layers)
    spoken.values |= leaves


def _forget(section: str, layers: Sequence[Layer]) -> None:
    for layer in layers:
        layer.values = {path: value for path, value in layer.values.items() if not below(path, [section])}
