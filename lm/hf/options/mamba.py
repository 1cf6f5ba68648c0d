"""Mamba-2 as the families of transformers that have it name its sizes and store its state."""

from collections.abc import Iterator
from math import inf

from lm.errors import ConfigError
from lm.hf.io.family import Pair, module, modules, same
from lm.hf.io.transforms import Split, Squeeze
from lm.schema import Tree

MAMBA = ("linear_attention", "mamba")  # in transformers 5, and in published files
UNLIMITED = ([0.0, inf], [0.0, {"__float__": "Infinity"}])
"""Steps of any size, in published files and as transformers 5 writes it."""


def require_free_steps(hf: Tree) -> None:
    """Raises ConfigError for a mixer whose steps have limits."""
    if (limit := hf.get("time_step_limit") or UNLIMITED[0]) not in UNLIMITED:
        raise ConfigError(f"config.json: time_step_limit={limit} limits what no option of lm does. Import another model.")


def read_mamba(hf: Tree, eps: float, inner: int | None = None) -> Tree:
    """Returns our Mamba-2 mixer for the config.json of a hybrid.  eps: the family's own, where the file has none; inner: the width of all
    heads together, None: that of mamba_expand.  Raises ConfigError."""
    if (act := hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act={act!r} is of the convolutions too, which are silu's in lm. Import another model.")
    require_free_steps(hf)
    heads, width = hf.get("mamba_n_heads", 128), hf["hidden_size"]
    head = hf.get("mamba_d_head", "auto")
    told = f"mamba_expand times hidden_size={width}" if inner is None else f"mamba_d_ssm={inner}"
    inner = hf.get("mamba_expand", 2) * width if inner is None else inner
    if head != "auto" and heads * head != inner:
        raise ConfigError(f"config.json: {heads} heads of mamba_d_head={head} are not {told} wide.")
    recurrent = {
        "kind": "mamba2", "n_heads": heads, "head_dim": inner // heads,
        "state_dim": hf.get("mamba_d_state", 256), "groups": hf.get("mamba_n_groups", 1), "kernel": hf.get("mamba_d_conv", 4),
        "kernel_bias": hf.get("mamba_conv_bias", True), "bias": hf.get("mamba_proj_bias", False),
        "eps": hf.get("rms_norm_eps", eps),
    }  # fmt: skip
    return {"recurrent": recurrent}


def write_mamba(ours: Tree) -> Tree:
    """Returns the keys of a Mamba-2 mixer in the config.json of a hybrid."""
    if ours.get("recurrent.kind") != "mamba2":
        return {"mamba_n_heads": 1}  # their default must divide a width that no layer has
    theirs = {"n_heads": "n_heads", "n_groups": "groups", "d_state": "state_dim", "d_head": "head_dim", "d_conv": "kernel"}
    theirs |= {"conv_bias": "kernel_bias", "proj_bias": "bias"}
    expand = ours["recurrent.n_heads"] * ours["recurrent.head_dim"] // ours["d_model"]
    return {"mamba_expand": expand, **{f"mamba_{key}": ours[f"recurrent.{name}"] for key, name in theirs.items()}}


def mamba_pairs(here: str, there: str, ours: Tree) -> Iterator[Pair]:
    """Yields the pairs of a mixer's tensors."""
    heads, groups = ours["recurrent.n_heads"], ours["recurrent.groups"]
    x, b = heads * ours["recurrent.head_dim"], groups * ours["recurrent.state_dim"]
    yield from modules((f"{here}.gate", f"{here}.xbc", f"{here}.rate"), f"{there}.in_proj", Split([x, x + 2 * b, heads]))
    yield Pair((f"{here}.kernel",), (f"{there}.conv1d.weight",), Squeeze())
    names = {"kernel_bias": "conv1d.bias", "fade": "A_log", "step": "dt_bias", "skip": "D", "norm": "norm.weight"}
    yield from (same(f"{here}.{name}", f"{there}.{theirs}") for name, theirs in names.items())
    yield from module(f"{here}.o", f"{there}.out_proj")
