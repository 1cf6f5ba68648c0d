"""Command R7B and Command A.  Cohere 2025, arXiv:2504.00698."""

from lm.hf.families.cohere import Cohere
from lm.hf.options.windows import WINDOW_KEYS, layer_types, read_rotating_windows, write_windows
from lm.schema import Tree


class Cohere2(Cohere):
    """Command R with a window in three of four layers; the fourth does not rotate."""

    name = "cohere2"
    architecture = "Cohere2ForCausalLM"
    theta = 10000.0
    further = (*WINDOW_KEYS, "sliding_window_pattern")
    idle = (
        "layer_switch", "order_of_interleaved_layers", "use_embedding_sharing", "use_gated_activation", "use_parallel_block",
        "use_parallel_embedding",
    )  # fmt: skip
    fixed_there = {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0}  # in files; transformers reads neither

    def read(self, hf: Tree) -> Tree:
        return read_rotating_windows(hf, layer_types(hf["num_hidden_layers"], hf.get("sliding_window_pattern", 4)), 4096)

    def write(self, ours: Tree) -> Tree:
        return write_windows(ours)


FAMILY = Cohere2()
