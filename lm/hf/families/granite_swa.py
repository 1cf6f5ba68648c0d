"""Granite with windows and sinks.  IBM 2026."""

from lm.errors import ConfigError
from lm.hf.families.granite import Granite
from lm.hf.options.windows import FULL, WINDOW_KEYS, layer_types, read_windows, write_windows
from lm.nn.spacing import evenly, is_there
from lm.schema import Tree

SWASH_KEYS = (*WINDOW_KEYS, "layer_rope_theta")


class GraniteSWA(Granite):
    """Granite with a window in all layers but every n-th, gpt-oss's sinks, and a rotary base for each layer, 0 where it does not rotate."""

    name = "granite_swa"
    architecture = "GraniteSWAForCausalLM"
    fields = {
        **Granite.fields,
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 4),
        "head.tied": ("tie_word_embeddings", True),
    }
    further = (*Granite.further, *SWASH_KEYS)
    fixed = {**Granite.fixed, "attention.gpt_oss_sinks": True}

    def read(self, hf: Tree) -> Tree:
        return super().read(hf) | read_swash(hf)

    def write(self, ours: Tree) -> Tree:
        return super().write(ours) | write_swash(ours)


def read_swash(hf: Tree) -> Tree:
    """Returns our options of windows, and of what rotates how. Raises ConfigError for bases that have no place in lm."""
    n = hf["num_hidden_layers"]
    usual = layer_types(n, 4, 0)
    windows, bases = read_windows(hf, usual, 128), hf.get("layer_rope_theta")
    if bases is None:
        return windows
    if len(bases) != n:
        raise ConfigError(f"config.json: layer_rope_theta has {len(bases)} layers and num_hidden_layers is {n}. Restore the file.")
    types = hf.get("layer_types") or usual
    still = [not base for base in bases]
    every, at = evenly(dict(enumerate(still))) or (None, None)
    # an empty set where no such layer rotates
    whole, local = ({base for base, kind in zip(bases, types, strict=True) if base and (kind == FULL) == full} for full in (True, False))
    apart = bool(whole and local and whole != local)
    scaled = (hf.get("rope_scaling") or hf.get("rope_parameters") or {}).get("rope_type", "default") != "default"
    if all(still) or (any(still) and every is None) or max(len(whole), len(local)) > 1 or (apart and scaled):
        raise ConfigError(
            f"config.json: layer_rope_theta={bases!r}: in lm layers without and with a window have one base each, the latter none of its"
            " own beside a scaling, and 0 is of one of every n layers. Import another model."
        )
    [theta, *_] = [float(base) for base in (*whole, *local)]
    rotary = {"position.theta": theta, "position.local_theta": float(*local) if apart else None}
    return {**windows, "position.none_every": every, "position.none_at": at, **rotary}


def write_swash(ours: Tree) -> Tree:
    """Returns layer_types, sliding_window and layer_rope_theta."""
    windows, theta = write_windows(ours), ours.get("position.theta")
    local = ours.get("position.local_theta") or theta
    bases = [theta if kind == FULL else local for kind in windows["layer_types"]]
    still = ours.get("position.none_every"), ours.get("position.none_at")
    return {**windows, "layer_rope_theta": [0.0 if is_there(layer, *still) else base for layer, base in enumerate(bases)]}


FAMILY = GraniteSWA()
