"""Layers of config values, weakest first, and the config that they make."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lm import plugins, printing
from lm.cli.compose.choices import Choices
from lm.cli.compose.keys import at
from lm.cli.compose.lengths import KEPT, WARMUP, WHOLE, beginning, in_steps, placed, spelled
from lm.cli.listing import known
from lm.errors import ConfigError, LmError
from lm.schema import C, Config, Tree, entry_type, find_field, flatten, from_tree, kind_from_key, nest, variants
from lm.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from lm.training.config import TrainConfig

SPOKEN, _COUNTED, _SHORT = "command line", "counted in steps", "short run"
_FROM_USER = (SPOKEN, _COUNTED)


@dataclass
class Layer:
    """Values by dotted path from one source."""

    label: str  # "preset", "recipe", ..., "command line"
    source: str  # a file, or a reason
    values: dict[str, Any]

    def told(self) -> str:
        """Returns a note on the layer's only value, which the user did not choose and may change."""
        [(path, value)] = self.values.items()
        return f"{path}={value}: {self.source}. Give another, if you want it"


@dataclass
class Composition:
    """The composed layers of values for `lm train`, not validated yet."""

    layers: list[Layer]  # weakest first
    choices: Choices
    notes: list[str]  # for the user: values left out, for example

    @property
    def tree(self) -> Tree:
        """The merged values of all layers."""
        return merged(self.layers)

    def chosen(self, group: str) -> str:
        """Returns the option of a group; where none is chosen, the kind that a file names or the class has, or null."""
        if (option := self.choices.get(group)) is not None:
            return option
        held = self.section(group.replace("/", "."))
        return str(held["kind"]) if isinstance(held, dict) and "kind" in held else "null"

    def section(self, path: str) -> Any:
        """Returns the values of a section, or those of the class where nothing states any; None where it has none."""
        tree, parts = self.tree, path.split(".")
        if (stated := at(tree, parts)) is not None:
            return stated
        _, field = find_field(known.root(), tree, parts)
        usual = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
        return usual.tree() if isinstance(usual, Config) else None

    def stated(self, path: str) -> list[tuple[Layer, Any]]:
        """Returns (layer, value) for each layer that sets this path, weakest first: the last one wins."""
        return [(layer, layer.values[path]) for layer in self.layers if path in layer.values]

    def full(self) -> Tree:
        """Returns all values, defaults included, as in a frozen config. Raises ConfigError for a value that does not fit its field."""
        self._count()
        return self._checked(known.root(), self.tree).tree()

    def config(self) -> "TrainConfig":
        """Returns the validated TrainConfig. Raises ConfigError, which names the file where a value in a file is wrong."""
        self._count()
        listed = known.root()
        found: Any = self._checked(listed, self.tree)
        if listed is not (real := known.real()):
            found = self._checked(real, self.tree)
        used = plugins.used(found)
        return found.replace(plugins=used) if used else found

    def part(self, cls: type[C], **sections: Tree) -> C:
        """Returns a validated `cls`, made of the composed sections that it has as fields; `sections` replace composed ones."""
        tree = merged([*self.layers, Layer(_COUNTED, "", beginning(self.tree))]) | sections
        return self._checked(cls, {key: tree[key] for key in cls.model_fields if key in tree})

    def tell(self) -> None:
        """Prints the notes."""
        for note in self.notes:
            printing.note(note)

    def keep_past(self) -> None:
        """Where the run exists, as it may be trained longer, takes the warm-up that it has, unless the command line gives one in steps, and
        beside steps to keep that are shares of its length those of before."""
        config, said = self.full(), self.stated(WARMUP)
        folder = RunFolder.of(config["run"])
        shares = any(key.startswith(KEPT) for layer in self.layers if layer.label == _COUNTED for key in layer.values)
        if not folder.exists() or not (said or shares):
            return
        try:
            before = flatten(folder.config())
        except LmError:
            return  # the training tells
        warmup, kept, now = before.get(WARMUP), before.get(KEPT), config["checkpoint"]["keep_steps"]
        if said and said[-1][0].label != SPOKEN and isinstance(warmup, int) and said[-1][1] != warmup < config["trainer"]["max_steps"]:
            self._keep(folder, WARMUP, warmup)
        if shares and isinstance(kept, list) and (both := [*now, *(step for step in kept if step not in now)]) != now:
            self._keep(folder, KEPT, both, "with those")

    def _keep(self, folder: RunFolder, key: str, value: object, what: str = "that") -> None:
        self.layers.append(Layer("run", str(folder.config_file), {key: value}))
        self.notes = [*self.notes, f"{key}={str(value).replace(' ', '')}: {what} of {folder}, which exists"]

    def _count(self) -> None:
        """Adds lengths that are no steps, such as 3epochs, in steps."""
        if not (lengths := spelled(self.tree)):
            return
        tree = self.tree
        cfg = replace(self, layers=[*self.layers, Layer(_COUNTED, "", beginning(tree))]).config()
        steps, notes = in_steps(cfg, lengths)
        self.layers.append(Layer(_COUNTED, ", ".join(f"{key}={each.text}" for key, each in lengths.items()), placed(tree, steps)))
        if (short := shorter_warmup(self.layers)) is not None:
            self.layers.append(short)
            notes.append(short.told())
        self.notes = [*self.notes, *notes]

    def _checked(self, cls: type[C], tree: Tree) -> C:
        try:
            return from_tree(cls, tree)
        except ConfigError as error:
            said = self.stated(error.sentence.partition(":")[0])
            if not said or said[-1][0].label == SPOKEN:
                raise
            raise ConfigError(f"{said[-1][0].source}: {error.sentence}") from error


def merged(layers: Sequence[Layer]) -> Tree:
    tree = nest(_seeds_apart({path: value for layer in layers for path, value in layer.values.items()}))
    named = [key for key, field in known.root().model_fields.items() if key in tree and entry_type(field.annotation) is not None]
    return tree | {key: kind_from_key(tree[key]) for key in named}


def _seeds_apart(values: Tree) -> Tree:
    """Returns values with a single seed split up: seed=0 and seed.init=1 -> seed.init=1, and 0 for the other seeds."""
    if not any(path.startswith("seed.") for path in values):
        return values
    seeds = variants(known.root().model_fields["seed"].annotation)[""]
    rest = {path: value for path, value in values.items() if path != "seed"}
    return {f"seed.{name}": values.get("seed", 0) for name in seeds.model_fields} | rest


def shorter_warmup(layers: Sequence[Layer]) -> Layer | None:
    """Returns a layer with a shorter warm-up, where the command line makes the run shorter than the files' warm-up; else None."""
    said = {path: (layer.label, value) for layer in layers for path, value in layer.values.items()}
    (by, steps), (of, before) = said.get(WHOLE, ("", None)), said.get(WARMUP, ("", None))
    if by not in _FROM_USER or of in _FROM_USER or not isinstance(steps, int) or not isinstance(before, int) or before < steps:
        return None
    return Layer(_SHORT, f"a tenth of the {steps} steps, as {before} would not end in them", {WARMUP: steps // 10})
