"""Which of our options other programs compute as we do: rules that each of them has for its classes."""

from lm.hf.io.differing import alike
from lm.schema import Tree

SILU: Tree = dict.fromkeys(("ffn.activation", "ffn.expert.activation", "ffn.dense.activation"), "silu")
UNBIASED: Tree = {"attention.qkv_bias": False, "attention.out_bias": False}


def unlike(ours: Tree, allowed: Tree, square: bool = False) -> str:
    """Returns what of a model is not as the rules want it, 'model.ffn.activation=gelu, and there it must be silu'; empty: nothing.

    allowed: values of our options, or tuples of them; options that a model does not have are not looked at. A window as wide as the
    context hides nothing.  square: all heads together must be as wide as the model.
    """
    if (ours.get("attention.window") or 0) >= ours["max_seq_len"]:
        ours = ours | {"attention.window": None}
    for option, rule in allowed.items():
        values = rule if isinstance(rule, tuple) else (rule,)
        if option in ours and not any(alike(ours[option], value) for value in values):
            return f"model.{option}={_shown(ours[option])}, and there it must be {' or '.join(map(_shown, values))}"
    width = ours["attention.n_heads"] * ours.get("attention.head_dim", 0) if square else ours["d_model"]
    if width != ours["d_model"]:
        return f"heads of {width} numbers together, and there they must be model.d_model={ours['d_model']}"
    return ""


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower()
