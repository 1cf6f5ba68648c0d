"""Ministral 3, text alone.  Mistral AI 2025, arXiv:2601.08584."""

from lm.errors import ConfigError
from lm.hf.families.mistral import Mistral
from lm.hf.options.rope import write_rope
from lm.nn.stack import ModelConfig
from lm.schema import Tree

_ORIGINAL, _RATE = "original_max_position_embeddings", "llama_4_scaling_beta"
_USUAL: Tree = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, _ORIGINAL: 16384, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, _RATE: 0.1,
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
        """As `Family.config`, with the rate of the growth among the keys, where `read` finds it."""
        told = hf.get("rope_scaling") or hf.get("rope_parameters") or _USUAL
        rope = {key: value for key, value in told.items() if key not in (_RATE, "max_position_embeddings")}
        return super().config({**hf, "rope_scaling": None, "rope_parameters": rope, _RATE: told.get(_RATE)})

    def read(self, hf: Tree) -> Tree:
        rope, rate = hf["rope_parameters"], hf[_RATE]
        every = rope.get(_ORIGINAL)
        if rope.get("rope_type", rope.get("type")) in ("llama3", "yarn", "longrope"):
            every = hf.get(_ORIGINAL) or every or hf["max_position_embeddings"]
        if missing := next((key for key, value in ((_RATE, rate), (_ORIGINAL, every)) if value is None), None):
            raise ConfigError(f"config.json: {missing} is missing among the rotary parameters, and ministral3 needs it. Restore the file.")
        return {"attention.query_growth": {"rate": rate, "every": every} if rate else None}

    def write(self, ours: Tree) -> Tree:
        there, growth = write_rope(ours), {key: ours.get(f"attention.query_growth.{key}") for key in ("rate", "every")}
        every = growth["every"] or there["rope_parameters"].get(_ORIGINAL) or ours["max_seq_len"]
        grown = {**there["rope_parameters"], _RATE: growth["rate"] or 0.0, _ORIGINAL: every}
        return {**there, "rope_scaling": None, "rope_parameters": grown}  # transformers would take the former, without a rate


FAMILY = Ministral3()
