"""A family of models: the mapping of its config and tensors, both ways. One file of lm/hf/families says all that is particular to it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import reduce
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from lm.errors import ConfigError
from lm.hf.io.differing import alike, differs
from lm.hf.io.transforms import Copies, Same, Stack, Transform
from lm.hf.options.rope import OLDER_KEYS, ROPE_KEYS, read_ropes, write_ropes
from lm.nn.ffn.mlp import Activation
from lm.nn.model_config import ModelConfig, model_config
from lm.nn.parts import ATTENDING
from lm.schema import MOST_LAYERS, Tree, flatten, nest

T = TypeVar("T")

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu", "relu2": "relu2",
}  # fmt: skip
"""Hugging Face's names for activations."""

TRAINING_ONLY = (
    "init.", "dropout", "attention.dropout", "ffn.dropout", "ffn.expert.dropout", "ffn.dense.dropout", "ffn.balance_loss",
    "ffn.router_z_loss", "ffn.router.bias_rate", "ffn.router.jitter", "ffn.reference", "mtp.weight", "first_token", "block.layer_dropout",
    "embed.noise", "attention.indexer.loss",
)  # fmt: skip
"""Options that change no logits of a trained model, so that no family needs a place for them."""


def without(options: Mapping[str, T], *patterns: str) -> dict[str, T]:
    """Returns the options, by their names, that match none of the patterns, such as `ffn.*` and `*bias`."""
    return {name: value for name, value in options.items() if not any(fnmatchcase(name, each) for each in patterns)}


class Pair(NamedTuple):
    """Names of tensors of our model and of tensors in the file that hold the same weights, and the transform between them."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transform: Transform = Same()

    def renamed(self, name: Callable[[str], str]) -> "Pair":
        """Returns the pair with what this makes of the names in the file."""
        return self._replace(theirs=tuple(map(name, self.theirs)))


def same(ours: str, theirs: str) -> Pair:
    """Returns the pair of one tensor that has two names."""
    return Pair((ours,), (theirs,))


def module(ours: str, theirs: str, transform: Transform | None = None) -> Iterator[Pair]:
    """Yields the pairs of weight and bias of one module; the bias where the model has one."""
    for name in ("weight", "bias"):
        yield Pair((f"{ours}.{name}",), (f"{theirs}.{name}",), transform or Same())


def modules(ours: tuple[str, ...], theirs: str, transform: Transform) -> Iterator[Pair]:
    """Yields the pairs of weights and biases of several modules that are one in the file."""
    for name in ("weight", "bias"):
        yield Pair(tuple(f"{one}.{name}" for one in ours), (f"{theirs}.{name}",), transform)


def experts(ours: str, theirs: str, n: int) -> Pair:
    """Returns the pair of one stacked tensor here and one tensor for each expert there; `*` in its name stands for the expert's number."""
    return Pair((ours,), tuple(theirs.replace("*", str(i)) for i in range(n)), Stack())


def gated(here: str, there: str, n_experts: int) -> Iterator[Pair]:
    """Yields the pairs of a dense gated feed-forward, and those of gated experts and their router; a layer has the ones or the others."""
    yield same(f"{here}.router.weight", f"{there}.gate.weight")
    for name in ("gate", "up", "down"):
        yield same(f"{here}.{name}.weight", f"{there}.{name}_proj.weight")
        yield experts(f"{here}.experts.{name}", f"{there}.experts.*.{name}_proj.weight", n_experts)


def sandwich(here: str, there: str, *names: tuple[str, str]) -> Iterator[Pair]:
    """Yields the pairs of the norms around the sublayers.  names: those before and behind attention, and those of the feed-forward, each
    without its ending `_layernorm`."""
    for slot, (before, behind) in zip(("attention", "ffn"), names, strict=True):
        yield from module(f"{here}.{slot}_residual.norm", f"{there}.{before}_layernorm")
        yield from module(f"{here}.{slot}_residual.norm_out", f"{there}.{behind}_layernorm")


def embedding(ours: Tree, shared: str, *stacks: str) -> Pair:
    """Returns the pair of an encoder-decoder's embedding; with an untied head, transformers 5 stores a copy for each stack too."""
    return same("embed.weight", shared) if ours["head.tied"] else Pair(("embed.weight",), (shared, *stacks), Copies(1 + len(stacks)))


class Family(ABC):
    """Options are named by dotted path, as on the command line without `model.`; "theirs" are the keys of config.json."""

    name: ClassVar[str]  # model_type
    architecture: ClassVar[str]  # transformers' class with the head
    recurrent_kind: ClassVar[str | None] = None  # kind of its recurrent layers, if it has some; a model without any prefers another family
    rare: ClassVar[bool] = False  # few other programs know it; a model that another family can hold too prefers that
    auto: ClassVar[str] = "AutoModelForCausalLM"
    prefix: ClassVar[str] = ""  # of the keys of a model without its head, which may be missing in the file
    ignored: ClassVar[tuple[str, ...]] = ()  # patterns of keys in files that hold no weight of the model
    older_endings: ClassVar[dict[str, str]] = {}  # of a tensor's key -> in older files
    zero_if_missing: ClassVar[tuple[str, ...]] = ()  # ends of keys of tensors that files leave out where they are zeros
    unwritten: ClassVar[tuple[str, ...]] = ()  # such keys of tensors that the class of transformers does not have
    beneath: ClassVar[str] = ""  # what keys begin with in files whose class has another head on this body
    renamed: ClassVar[dict[str, str]] = {}  # keys of config.json in other files -> theirs
    fields: ClassVar[dict[str, str | tuple[str, Any]]] = {}  # ours -> theirs, or (theirs, the value where it is missing)
    theta: ClassVar[float | None] = None  # of rotary positions, where the file names none; None: positions do not rotate
    local_theta: ClassVar[float | None] = None  # the same of layers with a window, which no scaling changes; None: all have one base
    older_ropes: ClassVar[bool] = True  # config.json has the rotary keys of transformers 4 too, beside those by kind of layer
    partial: ClassVar[float | None] = None  # part of each head that rotates, where the file names none; None: whole heads alone can
    unadapted: ClassVar[tuple[str, ...]] = ()  # ends of the paths of modules there to which peft adds no adapter
    built: ClassVar[dict[str, str]] = {}  # parts of names in the file -> in the modules that transformers builds, where these differ
    pad: ClassVar[int | None] = None  # id of the padding token, where positions there begin at id + 1; None: they begin at 0
    further: ClassVar[tuple[str, ...]] = ()  # keys of config.json that `read` and `write` handle
    idle: ClassVar[tuple[str, ...]] = ()  # keys of config.json without effect here, which so say nothing in files of other families either
    respelled: ClassVar[tuple[str, ...]] = ()  # keys of config.json whose value `read` takes in another spelling than `write` has
    fixed: ClassVar[Tree] = {}  # values of our options that all models of the family share
    fixed_there: ClassVar[Tree] = {}  # values of keys of config.json that all models share which we support

    def __init__(self, even_heads: bool = False) -> None:
        """even_heads: transformers' class takes no d_model that is not a multiple of n_heads, whatever head_dim is. Families that inherit
        from this one need not say so too."""
        self.even_heads = even_heads

    def read(self, hf: Tree) -> Tree:
        """Returns further options of ours, from config.json."""
        return {}

    def write(self, ours: Tree) -> Tree:
        """Returns further keys of config.json; an option that a model lacks is missing in `ours`."""
        return {}

    @abstractmethod
    def pairs(self, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of a model with these options. Callers leave out pairs whose tensors the model does not have."""

    def built_pairs(self, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs under the names of the modules that transformers builds."""
        for pair in self.pairs(ours):
            yield pair.renamed(self.as_built)

    def as_built(self, path: str) -> str:
        """Returns the name of a tensor, or of a module, in the modules that transformers builds."""
        return reduce(lambda name, parts: name.replace(*parts), self.built.items(), path)

    def in_file(self, path: str) -> str:
        """Returns the name in the file of what has this name in the modules that transformers builds."""
        return reduce(lambda name, parts: name.replace(parts[1], parts[0]), self.built.items(), path)

    def constants(self, ours: Tree) -> Mapping[str, Tensor]:
        """Returns tensors that files may hold beside the weights, float32 by their keys, such as tables of sines."""
        return {}

    def as_stored(self, hf: Tree, names: Collection[str]) -> Tree:
        """Returns config.json, corrected where it does not fit the tensors in the file.  names: of these tensors."""
        return hf

    def known_keys(self) -> set[str]:
        """Returns all keys of config.json that this family knows."""
        return {*self.keys_with_effect(), *self.idle}

    def keys_with_effect(self) -> set[str]:
        """Returns the keys of config.json that mean something in this family."""
        return {*(theirs for _, theirs, _ in self.places()), *self.further, *self.fixed_there, *(ROPE_KEYS if self.theta else ())}

    def places(self) -> Iterator[tuple[str, str, Any]]:
        """Yields for each of `fields` our option, the key of config.json, and the value where that is missing. Names of activations are
        theirs."""
        for ours, theirs in self.fields.items():
            yield (ours, theirs, _NEEDED) if isinstance(theirs, str) else (ours, *theirs)

    def ignores(self, hf: Tree) -> tuple[str, ...]:
        """Returns `ignored`; families override it where the patterns depend on config.json."""
        return self.ignored

    def config(self, hf: Tree) -> ModelConfig:
        """Returns our config for a config.json. Raises ConfigError naming what is missing or does not fit."""
        values = dict(self.fixed)
        for ours, key, missing in self.places():
            values[ours] = hf.get(key, missing)
            if values[ours] is _NEEDED:
                raise ConfigError(f"config.json: '{key}' is missing, and {self.name} needs it. Restore the file.")
        for name in ("n_layers", "n_encoder_layers"):  # read as many times below
            if (n := values.get(name)) is not None and (type(n) is not int or not 0 < n <= MOST_LAYERS):
                raise ConfigError(f"config.json: {n!r} layers do not fit; there are 1 to {MOST_LAYERS:,}. Restore the file.")
        if self.pad is not None and (pad := hf.get("pad_token_id", self.pad)) != self.pad:
            raise ConfigError(
                f"config.json: pad_token_id={pad}: positions begin behind it, and in lm behind {self.pad}. Import another model."
            )
        try:
            values |= {ours: activation(hf, key, missing) for ours, key, missing in self.places() if ours.endswith("activation")}
            part = {} if self.partial is None else {"partial_rotary_factor": self.partial}
            values |= read_ropes({**part, **hf}, self.theta, self.local_theta) if self.theta else {}
            values |= self.read(hf)
            if self.partial is None and values.get("position.fraction", 1.0) != 1.0:
                raise ConfigError(
                    f"config.json: partial_rotary_factor={values['position.fraction']} means nothing in {self.name}, which rotates whole"
                    " heads. Correct model_type, or remove the key."
                )
            if self.partial is not None and (values.get("position.scaling") or {}).get("kind") == "proportional":
                raise ConfigError(
                    f"config.json: rope_type='proportional' is of whole heads, and {self.name} rotates a part of each."
                    " Import another model."
                )
            return model_config(nest(values), "config.json")
        except KeyError as error:
            raise ConfigError(f"config.json: {error} is missing, and {self.name} needs it. Restore the file.") from None
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise ConfigError(f"config.json: a value does not fit {self.name} ({error}). Restore the file.") from None

    def hf(self, cfg: ModelConfig) -> Tree:
        """Returns config.json for our config; options that have no place in it are lost, see `homeless`."""
        ours = resolved(cfg)
        mapped = {key: hf_activation(ours.get(n)) if n.endswith("activation") else ours.get(n) for n, key, _ in self.places()}
        rope = write_ropes(ours | {"position.fraction": 1.0} if self.partial is None else ours, self.local_theta) if self.theta else {}
        rope = {key: value for key, value in rope.items() if self.older_ropes or key not in OLDER_KEYS}
        if self.partial not in (None, 1.0):  # without it another part is meant
            rope["partial_rotary_factor"] = ours.get("position.fraction")
        pad = {} if self.pad is None else {"pad_token_id": self.pad}
        named = {"model_type": self.name, "architectures": [self.architecture], **pad}
        return {**named, **self.fixed_there, **mapped, **rope, **self.write(ours)}

    def homeless(self, cfg: ModelConfig) -> list[str]:
        """Returns the options that change when written to this family's config.json and read back, or that transformers refuses:
        'model.name=value must be other', or a refusal in the words of its config.json.

        Empty where the family can hold the model.
        """
        ours = resolved(cfg)
        kinds = {key: value for key, value in self.fixed.items() if key.endswith("kind")}
        kinds.setdefault("residual.kind", "plain")
        if ours.get("recurrent.kind") not in (None, self.recurrent_kind):
            kinds["recurrent.kind"] = self.recurrent_kind
        wrong_kind = [differs(key, ours, kinds) for key in kinds if ours.get(key) != kinds[key]]
        if wrong_kind:
            return wrong_kind
        try:
            back = resolved(self.config(self.hf(cfg)))
        except ConfigError as error:
            return [str(error).removeprefix("config.json: ").rstrip(".")]
        idle = TRAINING_ONLY if {*ATTENDING} & {*ours["pattern"]} else (*TRAINING_ONLY, "attention.")
        keys = [key for key in dict.fromkeys([*ours, *back]) if not key.startswith(idle)]
        uneven = self.even_heads and ours["d_model"] % ours["attention.n_heads"] != 0
        said = f"model.d_model={ours['d_model']} must be a multiple of model.attention.n_heads={ours['attention.n_heads']}"
        found = [differs(key, ours, back) for key in keys if not alike(ours.get(key), back.get(key))]
        return ([said] if uneven else []) + [*dict.fromkeys(found)]


_NEEDED = object()


def resolved(cfg: ModelConfig) -> Tree:
    """Returns all options by dotted path, with the numbers that null and the parametrization stand for, and without windows that no layer
    has."""
    cfg = cfg.written_out()
    return flatten(cfg.tree()) | cfg.implied()


def families() -> dict[str, Family]:
    """Returns all families by model_type: FAMILY of each module of lm/hf/families that has one."""
    import lm.hf.families

    found = (getattr(import_module(f"lm.hf.families.{info.name}"), "FAMILY", None) for info in iter_modules(lm.hf.families.__path__))
    return {family.name: family for family in found if isinstance(family, Family)}


def activation(hf: Tree, key: str, missing: str) -> Activation:
    """Returns our activation for the name that config.json has under this key, or for `missing` where it has none. Raises ConfigError for
    an unknown name."""
    name = hf.get(key, missing)
    if name not in ACTIVATIONS:
        raise ConfigError(f"config.json: {key}={name!r} is not known. Known are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def hf_activation(ours: Activation | None) -> str | None:
    """Returns Hugging Face's name of our activation."""
    return "gelu_pytorch_tanh" if ours == "gelu_tanh" else ours
