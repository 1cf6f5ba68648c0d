"""Ministral 3, text alone.  Mistral AI 2025, arXiv:2601.08584."""

from lm.hf.families.mistral import Mistral
from lm.hf.options.growth import RATE, rate_apart, read_growth, write_growth
from lm.nn.model_config import ModelConfig
from lm.schema import Tree

_USUAL: Tree = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, RATE: 0.1,
}  # fmt: skip
"""Rotary parameters, where the file has none."""


class Ministral3(Mistral):
    """Mistral whose queries grow with their position, beyond the context of pretraining.

    Published files hold a model of images and text (model_type mistral3); this is what transformers saves of its text model.
    """

    name = "ministral3"
    architecture = "Ministral3ForCausalLM"
    fields = {
        **Mistral.fields,
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.head_dim": ("head_dim", 128),
        "attention.window": ("sliding_window", None),
    }

    def config(self, hf: Tree) -> ModelConfig:
        return super().config(rate_apart(hf, _USUAL))

    def read(self, hf: Tree) -> Tree:
        return read_growth(hf, self.name)

    def write(self, ours: Tree) -> Tree:
        return write_growth(ours)


FAMILY = Ministral3()
