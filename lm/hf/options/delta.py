"""The gated delta rule as the families of transformers that have it name its sizes and store its state."""

from collections.abc import Iterator

from lm.hf.io.family import Pair, same
from lm.schema import Tree

LINEAR = "linear_attention"
"""What `layer_types` calls a layer of it."""
DELTA = {
    "n_heads": "linear_num_value_heads", "n_k_heads": "linear_num_key_heads", "k_dim": "linear_key_head_dim",
    "v_dim": "linear_value_head_dim", "kernel": "linear_conv_kernel_dim",
}  # fmt: skip
"""Options of ours -> keys of config.json."""


def counts(ours: Tree) -> tuple[int, int]:
    """Returns the number of key heads, and that of value heads."""
    return ours["recurrent.n_k_heads"], ours["recurrent.n_heads"]


def widths(ours: Tree) -> list[int]:
    """Returns the widths of queries, keys and values, in the order in which our matrix has them."""
    keys, heads = counts(ours)
    return [keys * ours["recurrent.k_dim"]] * 2 + [heads * ours["recurrent.v_dim"]]


def state(here: str, there: str, norm: str) -> Iterator[Pair]:
    """Yields the pairs of a layer's tensors beside its matrices and its convolution.  norm: the name there of the norm on what is read from
    the state."""
    for ours, theirs in {"fade": "A_log", "step": "dt_bias", "norm": f"{norm}.weight"}.items():
        yield same(f"{here}.{ours}", f"{there}.{theirs}")
