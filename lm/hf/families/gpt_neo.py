"""GPT-Neo, and models of TinyStories.  Black et al. 2021, doi:10.5281/zenodo.5297715; Eldan & Li 2023, arXiv:2305.07759."""

from collections.abc import Iterator

from lm.hf.families.gpt2 import GPT2, OUT
from lm.hf.io.family import Pair, module
from lm.hf.options.windows import FULL, SLIDING, read_windows, write_windows
from lm.schema import Tree

_LOCAL = {"global": FULL, "local": SLIDING}


class GPTNeo(GPT2):
    """GPT-2 with a window in every second layer; scores are not scaled, and queries, keys and values have no bias."""

    name = "gpt_neo"
    architecture = "GPTNeoForCausalLM"
    ignored = (r"(transformer\.)?h\.\d+\.attn\.attention\.(masked_)?bias",)
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": "max_position_embeddings",
        "d_model": "hidden_size",
        "n_layers": "num_layers",
        "norm.eps": ("layer_norm_epsilon", 1e-5),
        "attention.n_heads": "num_heads",
        "attention.dropout": ("attention_dropout", 0.0),
        "dropout": ("resid_dropout", 0.0),
        "ffn.hidden": ("intermediate_size", None),
        "ffn.activation": ("activation_function", "gelu_new"),
        "head.tied": ("tie_word_embeddings", True),
    }
    further = ("attention_types", "attention_layers", "window_size")
    respelled = ("attention_types", "window_size")  # [[["global", "local"], 2]] is written as one list of four
    fixed = {**GPT2.fixed, "attention.qkv_bias": False, "attention.scale": 1.0}
    fixed_there = {}

    def read(self, hf: Tree) -> Tree:
        """Returns further options; `attention_layers`, which transformers makes of the types and writes beside them, goes before these."""
        told = hf.get("attention_types") or [[["global", "local"], 12]]
        layers = hf.get("attention_layers") or [name for names, times in told for _ in range(times) for name in names]
        given = {"attention_types": told, "attention_layers": layers}
        there = {**given, "num_hidden_layers": hf["num_layers"], "sliding_window": hf.get("window_size", 256)}
        said_by = "attention_layers" if hf.get("attention_layers") else "attention_types"
        return read_windows(there, [_LOCAL.get(name, name) for name in layers], None, said_by)

    def write(self, ours: Tree) -> Tree:
        found = write_windows(ours)
        names = ["global" if kind == FULL else "local" for kind in found["layer_types"]]
        return {
            **super().write(ours),
            "attention_types": [[names, 1]],
            "window_size": found.get("sliding_window", 256),
            "embed_dropout": ours["dropout"],
        }

    def linear(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        attention = {f"attention.{name}": f"attn.attention.{name}_proj" for name in "qkv"}
        for name, theirs in {**OUT, **attention, "attention.o": "attn.attention.out_proj"}.items():
            yield from module(f"{here}.{name}", f"{there}.{theirs}")


FAMILY = GPTNeo()
