"""DiffLlama, Llama with differential attention.  Ye et al. 2024, arXiv:2410.05258."""

from collections.abc import Iterator

from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, same, without
from lm.schema import Tree


class DiffLlama(Llama):
    """Llama whose pairs of heads are subtracted, and normed without a weight."""

    name = "diffllama"
    architecture = "DiffLlamaForCausalLM"
    fields = {
        **without(Llama.fields, "attention.dropout", "ffn.bias"),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.eps": ("rms_norm_eps", 1e-5),
    }
    further = ("lambda_std_dev",)
    fixed = {**Llama.fixed, "attention.kind": "differential"}
    fixed_there = {"attention_dropout": 0.0}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from super().block(here, there, ours)
        for name in ("q1", "k1", "q2", "k2"):
            yield same(f"{here}.attention.lambda_{name}", f"{there}.self_attn.lambda_{name}")


FAMILY = DiffLlama()
