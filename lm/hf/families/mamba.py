"""Mamba, without attention and without feed-forwards.  Gu & Dao 2023, arXiv:2312.00752."""

from collections.abc import Iterator
from typing import ClassVar

from lm.hf.io.family import Family, Pair, module, modules, same
from lm.hf.io.transforms import Flat, Split, Squeeze
from lm.schema import Tree


class Mamba(Family):
    """Every layer is one mixer, whose channels are a multiple of d_model.

    With use_bias, which no published model has, transformers lets padding into the convolution of the tokens behind it; lm does not.
    """

    name = "mamba"
    architecture = "MambaForCausalLM"
    recurrent_kind = "mamba"
    prefix = "backbone."
    unadapted: ClassVar[tuple[str, ...]] = ("out_proj", "dt_proj")  # whose matrices it reads past the modules
    older_endings = {"embeddings.weight": "embedding.weight"}
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": ("max_position_embeddings", 2048),
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "norm.eps": ("layer_norm_epsilon", 1e-5),
        "recurrent.state_dim": ("state_size", 16),
        "recurrent.kernel": ("conv_kernel", 4),
        "recurrent.kernel_bias": ("use_conv_bias", True),
        "recurrent.bias": ("use_bias", False),
        "head.tied": ("tie_word_embeddings", True),
    }
    further: ClassVar[tuple[str, ...]] = (
        "expand", "intermediate_size", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_scale",
        "time_step_init_scheme", "residual_in_fp32", "rms_norm", "fused_add_norm", "ssm_cfg", "use_mambapy", "use_associative_scan",
    )  # fmt: skip
    respelled: ClassVar[tuple[str, ...]] = ("time_step_rank",)  # auto
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "position.kind": "none", "recurrent.kind": "mamba",
        "recurrent.inner_eps": None, "pattern": ["recurrent"], "ffn.kind": "none", "block.kind": "sequential",
    }  # fmt: skip
    fixed_there = {"hidden_act": "silu", "rescale_prenorm_residual": False}  # set, transformers divides what it has loaded

    def read(self, hf: Tree) -> Tree:
        """Returns a placeholder for attention, which no layer has, as the config wants one. transformers computes the width from expand."""
        d, rank = hf["hidden_size"], hf.get("time_step_rank", "auto")
        sizes = {"recurrent.width": hf.get("expand", 2) * d, "recurrent.rank": -(-d // 16) if rank == "auto" else rank}
        return {"attention.kind": "gqa", "attention.n_heads": 1, **sizes}

    def write(self, ours: Tree) -> Tree:
        width = ours["recurrent.width"]
        return {"expand": width // ours["d_model"], "intermediate_size": width, "time_step_rank": ours["recurrent.rank"]}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("embed.weight", "backbone.embeddings.weight")
        yield same("head.weight", "lm_head.weight")
        yield from module("norm", "backbone.norm_f")
        for i in range(ours["n_layers"]):
            here, there = f"blocks.{i}.recurrent", f"backbone.layers.{i}"
            yield from module(f"{here}_residual.norm", f"{there}.norm")
            yield from self.mixer(here, f"{there}.mixer", ours)

    def mixer(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of a mixer's tensors."""
        yield from modules((f"{here}.x", f"{here}.gate"), f"{there}.in_proj", Split([ours["recurrent.width"]] * 2))
        yield Pair((f"{here}.kernel",), (f"{there}.conv1d.weight",), Squeeze())
        yield Pair((f"{here}.fade",), (f"{there}.A_log",), Flat(ours["recurrent.state_dim"]))
        yield from (same(f"{here}.{name}", f"{there}.{theirs}") for name, theirs in {"kernel_bias": "conv1d.bias", "skip": "D"}.items())
        for name, theirs in {"select": "x_proj", "step": "dt_proj", "o": "out_proj"}.items():
            yield from module(f"{here}.{name}", f"{there}.{theirs}")


FAMILY = Mamba()
