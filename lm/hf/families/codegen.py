"""CodeGen.  Nijkamp et al. 2022, arXiv:2203.13474."""

from collections.abc import Iterator

from lm.errors import ConfigError
from lm.hf.families.gptj import GPTJ
from lm.hf.io.family import Pair
from lm.hf.io.transforms import SplitHeads
from lm.schema import Tree

_PARTS = 4  # into which its matrices were cut for the processors that trained it


class CodeGen(GPTJ):
    """GPT-J whose queries, values and keys, in this order, are stored as one, a quarter of the heads after the other."""

    name = "codegen"
    architecture = "CodeGenForCausalLM"
    ignored = (*GPTJ.ignored, r"(transformer\.)?h\.\d+\.attn\.causal_mask")
    idle = (*GPTJ.idle, "n_ctx")

    def read(self, hf: Tree) -> Tree:
        if hf["n_head"] % _PARTS:
            raise ConfigError(
                f"config.json: n_head={hf['n_head']} is no multiple of {_PARTS}, and {self.name} stores heads in as many parts."
            )
        return super().read(hf)

    def projections(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        parts = SplitHeads(_PARTS, [ours["d_model"] // _PARTS] * 3)
        yield Pair(tuple(f"{here}.attention.{name}.weight" for name in "qvk"), (f"{there}.attn.qkv_proj.weight",), parts)


FAMILY = CodeGen()
