"""Layers that attend and layers that do not: `layer_types` of config.json, and our pattern; and which have experts: `mlp_layer_types`."""

from lm.errors import ConfigError
from lm.nn.model_config import shortest
from lm.schema import Tree

ATTENDS = ("full_attention", "attention")


def read_pattern(types: list[str], n_layers: int, recurrent: tuple[str, ...]) -> list[str]:
    """Returns our pattern.  recurrent: the family's names of layers that do not attend. Raises ConfigError for unknown names, and where
    there are not n_layers of them."""
    names = dict.fromkeys(ATTENDS, "attention") | dict.fromkeys(recurrent, "recurrent")
    if unknown := [name for name in types if name not in names]:
        raise ConfigError(f"config.json: layer_types has {unknown[0]!r}, and known are {', '.join(names)}. Import another model.")
    if len(types) != n_layers:
        raise ConfigError(f"config.json: layer_types has {len(types)} layers and num_hidden_layers is {n_layers}. Restore the file.")
    return shortest([names[name] for name in types])


def write_pattern(ours: Tree, recurrent: str) -> list[str]:
    """Returns layer_types, a name for each layer."""
    pattern = ours["pattern"]
    return [recurrent if pattern[i % len(pattern)] == "recurrent" else ATTENDS[0] for i in range(ours["n_layers"])]


def read_first_dense(hf: Tree, usual: int) -> int:
    """Returns how many of the first layers have no experts.  usual: of the family. Raises ConfigError where others have none either."""
    n = hf["num_hidden_layers"]
    types = hf.get("mlp_layer_types") or _kinds(usual, n)
    first = next((layer for layer, kind in enumerate(types) if kind != "dense"), n)
    if types != _kinds(first, n):
        raise ConfigError(f"config.json: mlp_layer_types={types} are not dense ones first. lm has no other pattern; import another model.")
    return first


def write_first_dense(ours: Tree) -> list[str]:
    """Returns mlp_layer_types, a name for each layer."""
    return _kinds(ours["ffn.first_dense"], ours["n_layers"])


def _kinds(first: int, n: int) -> list[str]:
    return ["dense" if layer < first else "sparse" for layer in range(n)]
