"""Granite with experts, and one that every token passes.  IBM 2025."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.granitemoe import GraniteMoE
from lm.hf.io.family import Pair, modules, same
from lm.hf.io.transforms import Split
from lm.schema import Tree


class GraniteMoEShared(GraniteMoE):
    """Granite with experts and a shared one, whose gate and up are one matrix too."""

    name = "granitemoeshared"
    architecture = "GraniteMoeSharedForCausalLM"
    fields = {**GraniteMoE.fields, "ffn.shared_hidden": ("shared_intermediate_size", 0)}
    fixed = {**GraniteMoE.fixed, "ffn.n_shared": 1}

    def read(self, hf: Tree) -> Tree:
        if not hf.get("shared_intermediate_size", 0):
            raise ConfigError("config.json: shared_intermediate_size=0 leaves no shared expert. Set model_type to granitemoe.")
        return super().read(hf)

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from super().ffn(here, there, ours)
        here, there, halves = f"{here}.ffn.shared", f"{there}.shared_mlp", Split([ours["ffn.shared_hidden"]] * 2)
        yield from modules((f"{here}.gate", f"{here}.up"), f"{there}.input_linear", halves)
        yield same(f"{here}.down.weight", f"{there}.output_linear.weight")


FAMILY = GraniteMoEShared()
