"""GLM-4-9B and GLM-Edge.  GLM team 2024, arXiv:2406.12793."""

from collections.abc import Iterator

from lm.hf.families.glm4 import GLM4
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair


class GLM(GLM4):
    """GLM-4-0414 with norms before the sublayers alone."""

    name = "glm"
    architecture = "GlmForCausalLM"
    fixed = {**GLM4.fixed, "norm.place": "pre"}

    def norms(self, here: str, there: str) -> Iterator[Pair]:
        return Llama.norms(self, here, there)


FAMILY = GLM()
