"""llama.cpp's architectures with one feed-forward a layer."""

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import Tensor

from lm.hf.gguf.architecture import Architecture, divisors
from lm.nn.model_config import ModelConfig
from lm.nn.position.scaling import ScalingConfig
from lm.schema import Tree

DIVIDED = (None, "linear", "dynamic", "yarn", "llama3", "longrope")
"""Scalings that divisors of the frequencies can tell: those by which all pairs turn."""
_QKV: dict[str, tuple[str, ...]] = {"attn_qkv": ("attention.q", "attention.k", "attention.v")}


class Llama(Architecture):
    """Any scaling of rotary positions, as divisors of the frequencies; heads rotate neighbours."""

    name = "llama"
    families: ClassVar[tuple[str, ...]] = ("llama", "mistral")
    fixed = {"attention.window": None, "position.scaling.kind": DIVIDED, "position.fraction": 1.0, "ffn.activation": "silu"}
    halves = False

    def scaling(self, scaling: ScalingConfig, ours: Tree) -> Tree:
        return {"rope.scaling.attn_factor": scaling.amplitude(ours["max_seq_len"])}

    def tensors(self, cfg: ModelConfig, ours: Tree, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors(cfg, ours, weights)
        if (found := divisors(cfg, ours)) is not None:
            yield "rope_freqs.weight", found


class Granite(Llama):
    """A llama with four factors."""

    name = "granite"
    families = ("granite",)

    def keys(self, cfg: ModelConfig, ours: Tree) -> Tree:
        return super().keys(cfg, ours) | {
            "attention.scale": ours["attention.scale"],
            "embedding_scale": ours["embed.scale"],
            "residual_scale": ours["block.residual_scale"],
            "logit_scale": 1 / ours["head.scale"],
        }


class Qwen2(Architecture):
    """Biases on queries, keys and values."""

    name = "qwen2"
    families = ("qwen2",)
    fixed = Architecture.fixed | {"ffn.activation": "silu", "attention.out_bias": False}
    square = True


class Qwen3(Architecture):
    """Queries and keys have norms."""

    name = "qwen3"
    families = ("qwen3",)
    fixed = Architecture.fixed | {"ffn.activation": "silu", "attention.out_bias": False}


class Gemma2(Architecture):
    """Norms around the sublayers, stored as the whole factor; a window in every second layer; both soft-caps."""

    name = "gemma2"
    families = ("gemma2",)
    fixed = {
        "position.scaling.kind": (None, "linear", "yarn"), "position.fraction": 1.0, "ffn.activation": "gelu_tanh", "head.tied": True,
        "attention.global_every": 2, "attention.global_at": None, "attention.qkv_bias": False, "attention.out_bias": False,
    }  # fmt: skip

    def refuse(self, ours: Tree) -> None:
        super().refuse(ours)
        width, rule = ours["attention.head_dim"], "1/sqrt(head_dim)"
        if ours["n_layers"] == 46:  # by which llama.cpp knows the model of 27 billion parameters (src/models/gemma2.cpp)
            width, rule = ours["d_model"] // ours["attention.n_heads"], "1/sqrt(d_model / n_heads), since there are 46 layers"
        usual = width**-0.5
        if not math.isclose(ours["attention.scale"], usual, rel_tol=1e-6):
            raise self.lacks(f"model.attention.scale={ours['attention.scale']:.4g}, and there it must be {usual:.4g}, {rule}")
        for option in ("attention.softcap", "head.softcap"):
            if ours[option] is None:
                raise self.lacks(f"model.{option}=null, and there it must be a number")

    def keys(self, cfg: ModelConfig, ours: Tree) -> Tree:
        return super().keys(cfg, ours) | {
            "attn_logit_softcapping": ours["attention.softcap"],
            "final_logit_softcapping": ours["head.softcap"],
            "attention.sliding_window": ours["attention.window"],
        }

    def changed(self, module: str, tensor: Tensor, ours: Tree) -> Tensor:
        return 1 + tensor.float() if module.endswith(("norm", "norm_out")) else tensor


class GPT2(Architecture):
    """Learned positions; q, k and v in one."""

    name = "gpt2"
    families = ("gpt2",)
    fixed = {"ffn.activation": "gelu_tanh"}
    square = True
    fused = _QKV


class Phi3(Architecture):
    """q, k and v in one, and gate and up; divisors of the frequencies."""

    name = "phi3"
    families = ("phi3",)
    fixed = {"attention.window": None, "position.scaling.kind": (None, "longrope"), "ffn.activation": "silu"}
    square = True
    fused = {**_QKV, "ffn_up": ("ffn.gate", "ffn.up")}

    def scaling(self, scaling: ScalingConfig, ours: Tree) -> Tree:
        return {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": scaling.amplitude(ours["max_seq_len"])}

    def keys(self, cfg: ModelConfig, ours: Tree) -> Tree:
        return super().keys(cfg, ours) | {"rope.scaling.original_context_length": ours["max_seq_len"], "attention.sliding_window": 0}

    def tensors(self, cfg: ModelConfig, ours: Tree, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields longrope's list of max_seq_len as both the long and the short one, since our model has one list for all lengths."""
        yield from super().tensors(cfg, ours, weights)
        if (found := divisors(cfg, ours)) is not None:
            yield from ((f"rope_factors_{length}.weight", found) for length in ("long", "short"))


class OLMo2(Architecture):
    """Norms behind the sublayers; a head of its own."""

    name = "olmo2"
    families = ("olmo2",)
    fixed = Architecture.fixed | {"ffn.activation": "silu", "attention.out_bias": False}
    square = True
    own_head = True
    names = Architecture.names | {"attention_residual.norm": "post_attention_norm", "ffn_residual.norm": "post_ffw_norm"}


class StarCoder2(Architecture):
    """Layer norms and biases."""

    name = "starcoder2"
    families = ("starcoder2",)
    fixed = Architecture.fixed | {"ffn.activation": "gelu_tanh", "attention.out_bias": True, "ffn.bias": True}
    square = True


class GPTNeoX(Architecture):
    """Attention and feed-forward side by side or not; a part of each head rotates."""

    name = "gptneox"
    families = ("gpt_neox",)
    fixed = {
        "position.scaling.kind": (None, "linear", "yarn"), "ffn.activation": "gelu_tanh", "attention.qkv_bias": True,
        "attention.out_bias": True,
    }  # fmt: skip
    square = True
    own_head = True
    fused = _QKV
    names = Architecture.names | {"attention_norm": "attn_norm", "ffn_norm": "ffn_norm"}

    def keys(self, cfg: ModelConfig, ours: Tree) -> Tree:
        return super().keys(cfg, ours) | {"use_parallel_residual": ours["block.kind"] == "parallel"}


class Bloom(Architecture):
    """ALiBi, and a norm behind the embedding."""

    name = "bloom"
    families = ("bloom",)
    fixed = {}
    square = True
    fused = _QKV
