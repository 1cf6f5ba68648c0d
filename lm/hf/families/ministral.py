"""Ministral 8B.  Mistral AI 2024, "Un Ministral, des Ministraux"."""

from lm.hf.families.mistral import Mistral
from lm.hf.io.family import without
from lm.hf.options.windows import WINDOW_KEYS, layer_types, read_windows, write_windows
from lm.schema import Tree


class Ministral(Mistral):
    """Mistral with a window in three of four layers."""

    name = "ministral"
    architecture = "MinistralForCausalLM"
    rare = True
    fields = without(Mistral.fields, "attention.window")
    further = WINDOW_KEYS

    def read(self, hf: Tree) -> Tree:
        return read_windows(hf, layer_types(hf["num_hidden_layers"], None), 4096)

    def write(self, ours: Tree) -> Tree:
        return write_windows(ours)


FAMILY = Ministral()
