"""Granite 3 with experts.  IBM 2024, "Granite 3.0 Language Models"."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.families.granite import Granite
from lm.hf.families.mixtral import Mixtral
from lm.hf.io.family import Pair, same, without
from lm.hf.io.transforms import Halves
from lm.schema import Tree


class GraniteMoE(Granite, Mixtral):
    """Granite's factors and Mixtral's experts, whose matrices are one tensor for gate and up and one for down."""

    name = "granitemoe"
    architecture = "GraniteMoeForCausalLM"
    theta: ClassVar[float | None] = 10000.0
    unadapted = ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear")  # parameters of other names
    fields = {
        **without(Granite.fields, "ffn.*", "attention.head_dim"),
        **{ours: theirs for ours, theirs in Mixtral.fields.items() if ours.startswith("ffn.") and ours != "ffn.router.jitter"},
    }
    fixed = {**Mixtral.fixed, "position.kind": "rope"}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        theirs = f"{there}.block_sparse_moe"
        yield same(f"{here}.ffn.router.weight", f"{theirs}.router.layer.weight")
        yield Pair((f"{here}.ffn.experts.gate", f"{here}.ffn.experts.up"), (f"{theirs}.input_linear.weight",), Halves())
        yield same(f"{here}.ffn.experts.down", f"{theirs}.output_linear.weight")


FAMILY = GraniteMoE()
