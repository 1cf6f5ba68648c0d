"""nanochat.  Karpathy 2025, github.com/karpathy/nanochat."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module, without
from lm.hf.io.transforms import ExchangeHalves
from lm.nn.model_config import ModelConfig
from lm.nn.position.rope import RopeConfig
from lm.schema import Tree


class NanoChat(Llama):
    """No norm has a weight, that of the embedding included; squared ReLU without a gate, a soft-cap, and heads that turn the other way.

    To turn (a, b) the other way is to turn (b, a), so the halves of each head of queries and keys are exchanged. There their norms come
    behind the rotation, which keeps their length.
    """

    name = "nanochat"
    architecture = "NanoChatForCausalLM"
    fields = {
        **without(Llama.fields, "ffn.bias"),
        "ffn.activation": ("hidden_act", "relu2"),
        "head.softcap": ("final_logit_softcapping", 15.0),
    }
    fixed = {**Llama.fixed, "norm.weight": False, "embed.norm": True, "attention.qk_norm": "head", "ffn.gated": False}

    def config(self, hf: Tree) -> ModelConfig:
        cfg = super().config(hf)
        assert isinstance(cfg.position, RopeConfig)
        scaling = cfg.position.scaling
        if scaling is not None and (longer := scaling.amplitude(cfg.max_seq_len or 0)) != 1.0:
            raise ConfigError(
                f"config.json: rope_type={scaling.kind} makes queries and keys {longer:.4g} times as long, which the norms behind the"
                f" rotation undo in {self.name}, and no norm does in lm. Set attention_factor=1."
            )
        return cfg

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        exchanged = ExchangeHalves(ours["attention.head_dim"])
        for name in "qkvo":
            yield from module(f"{here}.attention.{name}", f"{there}.self_attn.{name}_proj", exchanged if name in "qk" else None)
        yield from module(f"{here}.ffn.up", f"{there}.mlp.fc1")
        yield from module(f"{here}.ffn.down", f"{there}.mlp.fc2")


FAMILY = NanoChat()
