"""GPT, the first one.  Radford et al. 2018, "Improving language understanding by generative pre-training"."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.gpt2 import GPT2
from lm.hf.io.family import Pair, without
from lm.nn.ffn.mlp import Activation
from lm.schema import Tree

_NAMES: dict[str, Activation] = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
"""Its names of activations -> ours: what it calls gelu is the approximation by tanh."""


class GPT(GPT2):
    """GPT-2 with norms behind the sublayers, and a feed-forward that is four times as wide as the model."""

    name = "openai-gpt"
    architecture = "OpenAIGPTLMHeadModel"
    ignored = (r"(transformer\.)?(h\.\d+\.attn\.bias|position_ids)",)
    fields = {
        **without(GPT2.fields, "ffn.*"),
        "max_seq_len": ("n_positions", 512),
    }
    further = ("afn",)
    idle = (*GPT2.idle, "n_special", "predict_special_tokens", "summary_type", "summary_use_proj", "summary_proj_to_labels")
    fixed = {**GPT2.fixed, "norm.place": "post", "ffn.hidden": None}
    fixed_there = {}

    def read(self, hf: Tree) -> Tree:
        if (name := hf.get("afn", "gelu")) not in _NAMES:
            raise ConfigError(f"config.json: afn={name!r} is not known. Known are {', '.join(_NAMES)}.")
        return {"ffn.activation": _NAMES[name]}

    def write(self, ours: Tree) -> Tree:
        names = {mine: theirs for theirs, mine in reversed(_NAMES.items())}
        return {"afn": names.get(ours["ffn.activation"]), "embd_pdrop": ours["dropout"]}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        for pair in super().pairs(ours):
            yield pair.renamed(lambda key: _EMBEDS.get(key, key))


_EMBEDS = {"transformer.wte.weight": "transformer.tokens_embed.weight", "transformer.wpe.weight": "transformer.positions_embed.weight"}
FAMILY = GPT()
