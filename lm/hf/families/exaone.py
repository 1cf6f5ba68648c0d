"""EXAONE 3.0 and 3.5.  LG AI Research 2024, arXiv:2408.03541 and arXiv:2412.04862."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair
from lm.schema import Tree


class Exaone(Llama):
    """Llama under GPT-2's names, in the published files and in other programs; transformers loads it since 5.24, as its Llama."""

    name = "exaone"
    architecture = "ExaoneForCausalLM"
    rare = True
    prefix = "transformer."
    theta = 500000.0
    ignored = (r"(transformer\.)?h\.\d+\.attn\.attention\.rotary\.inv_freq", r"(transformer\.)?rotary\.inv_freq")
    renamed = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}
    fields = {
        **Llama.fields,
        "vocab_size": ("vocab_size", 102400),
        "max_seq_len": ("max_position_embeddings", 4096),
        "n_layers": ("num_layers", 32),
        "norm.eps": ("layer_norm_epsilon", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "ffn.hidden": ("intermediate_size", 14336),
        "ffn.activation": ("activation_function", "silu"),
    }
    idle = ("embed_dropout",)
    built = {
        "transformer.wte": "model.embed_tokens", "transformer.h.": "model.layers.", "transformer.ln_f": "model.norm",
        ".attn.attention.out_proj": ".self_attn.o_proj", ".attn.attention.": ".self_attn.", ".ln_1": ".input_layernorm",
        ".ln_2": ".post_attention_layernorm", ".c_fc_0": ".gate_proj", ".c_fc_1": ".up_proj", ".c_proj": ".down_proj",
    }  # fmt: skip

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        for pair in super().pairs(ours):
            yield pair.renamed(self.in_file)


FAMILY = Exaone(even_heads=True)
