"""Qwen3.5 with experts, text alone.  Qwen 2026, "Qwen3.5: towards native multimodal agents"."""

from collections.abc import Iterator

from lm.hf.families.qwen3_next import Qwen3Next
from lm.hf.io.family import Pair, module, without
from lm.nn.model_config import ModelConfig
from lm.schema import Tree

_GRIDS = ("mrope_section", "mrope_interleaved")  # which dimensions turn by height and width, where text has its position
_SPARSE = ("mlp_only_layers", "intermediate_size")  # of Qwen3-Next; here all layers have experts


class Qwen35MoE(Qwen3Next):
    """Qwen3-Next with experts in every layer, and with a matrix for each of what its recurrent layers read.

    Published files hold a model of images and text (model_type qwen3_5_moe); this is what transformers saves of its text model.
    """

    name = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"
    ignored = (*Qwen3Next.ignored, r"model\.visual\..*")
    fields = {
        **without(Qwen3Next.fields, "ffn.every", "ffn.router.normalize"),
        "ffn.top_k": ("num_experts_per_tok", 8),
    }
    further = tuple(key for key in Qwen3Next.further if key not in _SPARSE)

    def config(self, hf: Tree) -> ModelConfig:
        rope = {key: hf[key] for key in ("rope_scaling", "rope_parameters") if isinstance(hf.get(key), dict)}
        return super().config(hf | {key: without(told, *_GRIDS) for key, told in rope.items()})

    def read(self, hf: Tree) -> Tree:
        return super().read({"num_experts": 256, **hf, "mlp_only_layers": [], "decoder_sparse_step": 1})

    def write(self, ours: Tree) -> Tree:
        return without(super().write(ours), *_SPARSE)

    def inputs(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        for name, theirs in {"qkv": "qkv", "gate": "z", "beta": "b", "rate": "a"}.items():
            yield from module(f"{here}.{name}", f"{there}.in_proj_{theirs}")


FAMILY = Qwen35MoE()
