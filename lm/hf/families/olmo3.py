"""OLMo 3.  arXiv:2512.13961."""

from lm.hf.families.olmo2 import OLMo2
from lm.hf.options.windows import WINDOW_KEYS, layer_types, read_windows, write_windows
from lm.schema import Tree


class OLMo3(OLMo2):
    """OLMo 2 with a window in three of four layers, which no rotary scaling changes."""

    name = "olmo3"
    architecture = "Olmo3ForCausalLM"
    theta = 500000.0
    local_theta = 500000.0
    further = WINDOW_KEYS

    def read(self, hf: Tree) -> Tree:
        return read_windows(hf, layer_types(hf["num_hidden_layers"], 4), 4096)

    def write(self, ours: Tree) -> Tree:
        return write_windows(ours)


FAMILY = OLMo3()
