"""Granite with experts, windows and sinks.  IBM 2026."""

from collections.abc import Iterator

from lm.hf.families.granite_swa import SWASH_KEYS, read_swash, write_swash
from lm.hf.families.granitemoe import GraniteMoE
from lm.hf.families.granitemoeshared import GraniteMoEShared
from lm.hf.io.family import Pair
from lm.schema import Tree


class GraniteMoESWA(GraniteMoEShared):
    """Granite with experts, maybe a shared one, and the windows, sinks and rotary bases of GraniteSWA."""

    name = "granitemoe_swa"
    architecture = "GraniteMoeSWAForCausalLM"
    unadapted = ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj")
    fields = GraniteMoE.fields
    further = (*GraniteMoE.further, *SWASH_KEYS, "shared_intermediate_size")
    fixed = {**GraniteMoE.fixed, "attention.gpt_oss_sinks": True}

    def read(self, hf: Tree) -> Tree:
        width = hf.get("shared_intermediate_size") or None
        shared = {"ffn.n_shared": 0 if width is None else 1, "ffn.shared_hidden": width}
        return super(GraniteMoEShared, self).read(hf) | read_swash(hf) | shared

    def write(self, ours: Tree) -> Tree:
        width = ours.get("ffn.shared_hidden") if ours["ffn.n_shared"] else 0
        return super().write(ours) | write_swash(ours) | {"shared_intermediate_size": width}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        names = {
            "router.layer.weight": "router.weight",
            "input_linear.weight": "experts.gate_up_proj",
            "output_linear.weight": "experts.down_proj",
        }
        within = f"{there}.block_sparse_moe."
        for pair in super().ffn(here, there, {"ffn.shared_hidden": 0, **ours}):
            yield pair.renamed(lambda key: within + names[key.removeprefix(within)] if key.startswith(within) else key)


FAMILY = GraniteMoESWA()
