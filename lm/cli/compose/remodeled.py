"""A model's config, changed by overrides of its section alone: for `lm remodel`, which keeps the weights."""

from collections.abc import Sequence

from lm.cli.compose import catalog
from lm.cli.compose.compose import apply, leave_out
from lm.cli.compose.layers import SPOKEN, Layer, merged
from lm.cli.compose.overrides import parse
from lm.errors import ConfigError
from lm.schema import Tree, flatten

_ELSEWHERE = {
    "model": "a preset is a whole other model. Choose options of its slots, such as model/ffn=moe",
    "model.head.labels": "what the head tells stays. A new one comes with lm train objective=classify",
    "model.kind": "it reads as it did. Leave that out",
    "model.n_layers": "which layers there are is said by layers. Write layers=0-5,3-8, say",
    "model.vocab_size": "that of the tokenizer stays. Add tokens in training, by tokenizer.specials",
}


def remodeled(model: Tree, source: str, overrides: Sequence[str]) -> Tree:
    """Returns the tree of a model's config with these overrides: options of its slots, each with its own values, and single keys. All
    else stays, and a mixture's experts are as the feed-forward was. Raises ConfigError for other sections and as `compose`.

    model: the whole tree of a ModelConfig.  source: its folder, for messages.
    """
    given = parse(overrides)
    for item in given:
        if item.key.replace("/", ".").partition(".")[0] != "model":
            raise ConfigError(f"{item.text}: a model is rebuilt here, and nothing is trained. Give options of model alone.")
        if (why := _ELSEWHERE.get(item.key)) is not None:
            raise ConfigError(f"{item.text}: {why}.")
    own = Layer("model", source, flatten(model, "model."))
    layers = [own]
    for item in (item for item in given if item.is_group):
        section = item.key.replace("/", ".")
        own.values.pop(section, None)  # null
        if item.value is None:
            own.values = {path: value for path, value in own.values.items() if not path.startswith(f"{section}.")} | {section: None}
            continue
        option = Layer("option", catalog.source(item.key, item.value), catalog.with_inherited(item.key, item.value))
        kinds = {path.removesuffix(".kind"): kind for path, kind in own.values.items() if path.endswith(".kind")}
        leave_out(own, item.key, item.value, merged([*layers, option]))
        for path, kind in option.values.items():  # of a slot within the slot, whose kind changes, nothing stays
            inner = path.removesuffix(".kind")
            if inner not in (path, section) and kinds.get(inner, kind) != kind:
                own.values = {key: value for key, value in own.values.items() if not key.startswith(f"{inner}.")}
        layers.insert(0, option)
    now = merged(layers)["model"]["ffn"] | {item.key.removeprefix("model.ffn."): item.value for item in given if not item.is_group}
    layers.append(Layer("feed-forward", source, _as_experts(model["ffn"], now)))
    spoken = Layer(SPOKEN, "", {})
    for item in sorted((item for item in given if not item.is_group), key=lambda item: not item.key.endswith(".kind")):
        apply(item, layers, spoken)
    tree: Tree = merged([*layers, spoken])["model"]
    return tree


def _as_experts(before: Tree, now: Tree) -> Tree:
    """Returns values of a mixture's parts, by dotted path, where it takes the place of a feed-forward without experts."""
    if (before["kind"], now["kind"]) != ("mlp", "moe"):
        return {}
    parts = ["expert", *(["dense"] if now.get("first_dense") or now.get("every", 1) != 1 else [])]
    own = {key: value for key, value in before.items() if key != "kind"}
    return {path: value for part in parts for path, value in flatten(own, f"model.ffn.{part}.").items()}
