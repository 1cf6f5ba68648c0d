"""SantaCoder and StarCoder 1.  Li et al. 2023, arXiv:2305.06161."""

from collections.abc import Iterator

from lm.hf.families.gpt2 import GPT2, OUT
from lm.hf.io.family import Pair, module, modules
from lm.hf.io.transforms import Split, SplitHeads
from lm.schema import Tree


class GPTBigCode(GPT2):
    """GPT-2 with one head of keys and values for all queries, or with as many, and then q, k and v are stored by head."""

    name = "gpt_bigcode"
    architecture = "GPTBigCodeForCausalLM"
    fields = {
        **GPT2.fields,
        "ffn.activation": ("activation_function", "gelu_pytorch_tanh"),
    }
    further = ("multi_query", "num_key_value_heads")
    idle = (
        *GPT2.idle, "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "max_batch_size",
        "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input",
    )  # fmt: skip
    fixed_there = {"scale_attn_weights": True, "add_cross_attention": False}

    def read(self, hf: Tree) -> Tree:
        return {"attention.n_kv_heads": 1 if hf.get("multi_query", True) else hf["n_head"]}

    def write(self, ours: Tree) -> Tree:
        return {"multi_query": ours.get("attention.n_kv_heads") == 1, "embd_pdrop": ours["dropout"]}

    def linear(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        heads, width = ours["attention.n_heads"], ours["attention.head_dim"]
        one = ours["attention.n_kv_heads"] == 1
        joined = Split([ours["d_model"], width, width]) if one else SplitHeads(heads, [width] * 3)
        yield from modules(tuple(f"{here}.attention.{name}" for name in "qkv"), f"{there}.attn.c_attn", joined)
        for name, theirs in OUT.items():
            yield from module(f"{here}.{name}", f"{there}.{theirs}")


FAMILY = GPTBigCode()
