"""StarCoder 2.  Lozhkov et al. 2024, arXiv:2402.19173."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, module
from lm.schema import Tree


class StarCoder2(Llama):
    """Llama with layer norms, biases everywhere, a feed-forward without a gate, and a window in every layer."""

    name = "starcoder2"
    architecture = "Starcoder2ForCausalLM"
    fields = {
        **Llama.fields,
        "norm.eps": ("norm_epsilon", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 2),
        "attention.qkv_bias": ("use_bias", True),
        "attention.out_bias": ("use_bias", True),
        "attention.window": ("sliding_window", None),
        "ffn.bias": ("use_bias", True),
        "ffn.activation": ("hidden_act", "gelu_pytorch_tanh"),
        "head.tied": ("tie_word_embeddings", True),
        "dropout": ("residual_dropout", 0.0),
    }
    idle = ("activation_function", "scale_attn_weights", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    fixed = {**Llama.fixed, "norm.kind": "layer", "ffn.gated": False}

    def write(self, ours: Tree) -> Tree:
        return {"embedding_dropout": ours["dropout"]}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from module(f"{here}.ffn.up", f"{there}.mlp.c_fc")
        yield from module(f"{here}.ffn.down", f"{there}.mlp.c_proj")


FAMILY = StarCoder2()
