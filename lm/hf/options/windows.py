"""Windows in some of the layers: `layer_types` and `sliding_window` of config.json, and our window, global_every, global_at; and which of
these layers rotate."""

from lm.errors import ConfigError
from lm.nn.spacing import evenly, is_there
from lm.schema import Tree

WINDOW_KEYS = ("sliding_window", "layer_types")
SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(n_layers: int, every: int | None, at: int | None = None) -> list[str]:
    """Returns `layer_types` with windows in all layers but one of `every` ones: the last of them, or the one at place `at`."""
    return [FULL if is_there(layer, every, at) else SLIDING for layer in range(n_layers)]


def read_windows(hf: Tree, usual: list[str], window: int | None, said_by: str = "layer_types", others: tuple[str, ...] = ()) -> Tree:
    """Returns our options by dotted path.  usual, window: of the family, where the file has no layer_types and no sliding_window.  others:
    its names of layers that do not attend.

    Raises ConfigError for layers that no global_every describes, naming the key `said_by`.
    """
    types, window = hf.get("layer_types") or usual, hf.get("sliding_window", window)
    kinds = {layer: kind for layer, kind in enumerate(types) if kind not in others}
    if len(types) == hf["num_hidden_layers"] and {*kinds.values()} <= {FULL}:
        return {"attention.window": None, "attention.global_every": None}
    every, at = evenly({layer: kind == FULL for layer, kind in kinds.items()}) or (None, None)
    expected = layer_types(hf["num_hidden_layers"], every, at)
    if len(types) != len(expected) or any(expected[layer] != kind for layer, kind in kinds.items()) or window is None:
        raise ConfigError(
            f"config.json: {said_by}={hf.get(said_by)!r} with sliding_window={window} is not a window in all layers but every n-th."
            " lm has no other pattern; import another model."
        )
    return {"attention.window": window, "attention.global_every": every, "attention.global_at": at}


def read_rotating_windows(hf: Tree, usual: list[str], window: int | None) -> Tree:
    """As `read_windows`, of families whose layers without a window do not rotate. Raises ConfigError also where no layer has a window."""
    found = read_windows(hf, usual, window)
    if found["attention.window"] is None:
        raise ConfigError(
            f"config.json: layer_types={hf.get('layer_types')!r}: layers without a window do not rotate, and in lm one of every n"
            " layers alone may do without. Import another model."
        )
    return {**found, "position.none_every": found["attention.global_every"], "position.none_at": found["attention.global_at"]}


def write_windows(ours: Tree) -> Tree:
    """Returns layer_types and sliding_window; the latter only where a layer has a window."""
    window, n_layers = ours.get("attention.window"), ours["n_layers"]
    if window is None:
        return {"layer_types": [FULL] * n_layers}
    types = layer_types(n_layers, ours.get("attention.global_every"), ours.get("attention.global_at"))
    return {"layer_types": types, "sliding_window": window}
