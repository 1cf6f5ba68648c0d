"""Rotary options of config.json, in the spelling of transformers 5 (`rope_parameters`) and of 4 (`rope_theta`, `rope_scaling`)."""

from typing import Any

from lm.errors import ConfigError
from lm.nn.position.scaling import ScalingConfig
from lm.schema import Tree

ROPE_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "rope_local_base_freq",
)  # fmt: skip
OLDER_KEYS = ("rope_theta", "rope_scaling", "rope_local_base_freq")
"""Those of transformers 4."""
_OF_ALL_KINDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned")
"""The last has no effect: it says that a model was trained with the scaling."""
_THEIRS = {"position.scaling.kind": "rope_type", "position.scaling.original_len": "original_max_position_embeddings"}


def read_rope(hf: Tree, theta: float = 10000.0) -> Tree:
    """Returns our `position.*` options by dotted path.  theta: the family's, where the file names none."""
    there = hf.get("rope_scaling") or hf.get("rope_parameters") or {}  # transformers' order
    _require_flat(there)
    kind = str(there.get("rope_type", there.get("type", "default")))
    kind = {"su": "longrope"}.get(kind, kind)
    fraction = there.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    ours: Tree = {
        "position.kind": "rope",
        "position.theta": float(next((t for t in (there.get("rope_theta"), hf.get("rope_theta")) if t is not None), theta)),
        "position.fraction": 1.0 if fraction is None else fraction,
        "position.scaling": None,
    }
    _require_known(kind, there)
    if kind == "proportional":  # whose part is that of the pairs
        ours, there = ours | {"position.fraction": 1.0}, {**there, "partial_rotary_factor": ours["position.fraction"]}
    return ours if kind == "default" else ours | {"position.scaling": _read_scaling(kind, there, hf)}


def read_ropes(hf: Tree, theta: float, local_theta: float | None) -> Tree:
    """As `read_rope`, and the base of layers with a window.  local_theta: the family's, where the file names none; None: it has none."""
    if local_theta is None:
        return read_rope(hf, theta)
    there = hf.get("rope_parameters") or {}
    local: Tree = there.get("sliding_attention") or {"rope_theta": hf.get("rope_local_base_freq")}
    if (kind := local.get("rope_type", local.get("type", "default"))) != "default":
        raise ConfigError(f"config.json: layers with a window have rope_type={kind!r}, and in lm no scaling. Import another model.")
    base = local.get("rope_theta")
    scaling: Tree = hf.get("rope_scaling") or {}
    if "rope_type" not in scaling and scaling.get("type", "default") != "default":
        raise ConfigError(
            f"config.json: rope_scaling has type={scaling['type']!r} and no rope_type, and where layers with a window have rotary"
            " parameters of their own, transformers reads rope_type alone. Write rope_type."
        )
    given: Tree = there.get("full_attention") or {}
    apart = {key: value for key, value in there.items() if not key.endswith("_attention")}

    def read(parameters: Tree) -> Tree:
        full = {key: value for key, value in (parameters | scaling).items() if key != "truncate"}  # transformers always truncates
        return read_rope({**_without_original(hf), "rope_scaling": None, "rope_parameters": full}, theta)

    ours = read(given)
    if not given and read(apart) != ours:
        raise ConfigError(
            "config.json: rope_parameters are not by type of layer, and where layers with a window have their own, transformers looks at"
            " full_attention and sliding_attention alone. Write them so."
        )
    return {**ours, "position.local_theta": float(local_theta if base is None else base)}


def write_ropes(ours: Tree, local_theta: float | None) -> Tree:
    """Returns the rotary keys in both spellings, for layers without and with a window."""
    there = write_rope(ours)
    if local_theta is None:
        return there
    theta = ours.get("position.local_theta") or ours.get("position.theta")
    local = {"rope_type": "default", "rope_theta": theta}
    types = {"full_attention": there["rope_parameters"], "sliding_attention": local}
    return {**there, "rope_local_base_freq": theta, "rope_parameters": types}


def _without_original(hf: Tree) -> Tree:
    """Returns config.json without its own original length, at which transformers does not look where parameters are by type of layer."""
    return {**hf, "original_max_position_embeddings": None}


def _require_flat(there: Tree) -> None:
    """Raises ConfigError for rotary parameters by type of layer: transformers' classes whose layers have the same ignore them, and take
    the plain ones with their usual base, or fail."""
    if there and all(key.endswith("_attention") for key in there):
        raise ConfigError(
            f"config.json: rotary parameters are told by type of layer ({', '.join(there)[:80]}), and transformers' class, whose layers"
            " all have the same, does not look at them there. Write those of all layers, without the types."
        )


def _require_known(kind: str, there: Tree) -> None:
    """Raises ConfigError for a type, or a parameter of it, that lm does not have."""
    kinds = ScalingConfig.kinds()
    if kind not in ("default", *kinds):
        raise ConfigError(f"config.json: rope_type={kind[:80]!r} is not known. Known are {', '.join(kinds)}.")
    known = {*_OF_ALL_KINDS, *(kinds[kind].model_fields if kind in kinds else ())} - {"kind", "original_len"}
    for key, value in there.items():
        if key not in known and value is not None:
            raise ConfigError(
                f"config.json: {key}={value!r} among the rotary parameters has no place in lm's rope_type {kind}."
                " Import another model, or remove the key where it changed nothing."
            )


def _read_scaling(kind: str, there: Tree, hf: Tree) -> Tree:
    kinds = ScalingConfig.kinds()
    original = hf.get("original_max_position_embeddings") or there.get("original_max_position_embeddings")  # transformers' order
    known: Tree = {name: there.get(name) for name in kinds[kind].model_fields if there.get(name) is not None}
    if kind == "dynamic":
        original = None  # transformers looks at max_position_embeddings alone
    if "original_len" in kinds[kind].model_fields:
        known["original_len"] = original or hf["max_position_embeddings"]
    return {**{name: _floats(value) for name, value in known.items()}, "kind": kind}


def _floats(value: Any) -> Any:
    """Returns the numbers of a list as floats, since files write 8 for 8.0; any other value as it is."""
    return [float(x) for x in value] if isinstance(value, list) else value


def write_rope(ours: Tree) -> Tree:
    """Returns the rotary keys of config.json in both spellings."""
    scaling = {_THEIRS.get(key, key): value for key, value in ours.items() if key.startswith("position.scaling.") and value is not None}
    there = {key.removeprefix("position.scaling."): value for key, value in scaling.items()} or {"rope_type": "default"}
    theta, fraction = ours.get("position.theta"), ours.get("position.fraction")
    partial = {"partial_rotary_factor": fraction} if fraction not in (None, 1.0) else {}
    original = there.get("original_max_position_embeddings")
    return {
        "rope_theta": theta,
        "rope_scaling": {**there, "type": there["rope_type"]} if scaling else None,
        "rope_parameters": {**there, **partial, "rope_theta": theta},
        **partial,
        **({"original_max_position_embeddings": original} if there["rope_type"] == "longrope" else {}),
    }
