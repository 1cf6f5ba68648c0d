"""What vLLM makes of an exported folder, by the source of its release 0.33 (vllm/model_executor/models)."""

import shlex
from pathlib import Path

from lm.hf.io.family import Family, alike, resolved
from lm.nn.transformer import ModelConfig
from lm.schema import Tree

HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths that its attention on CPUs takes (vllm/v1/attention/backends/cpu_attn.py); its kernels for GPUs have fewer and larger ones."""
ABSENT = ("bamba", "codegen", "diffllama", "gpt_neo", "mpt", "openai-gpt", "recurrent_gemma", "xglm")
"""It has none of these (of some: no more), and in a layer of their classes in transformers it finds no attention that it could replace."""
_ACTIVATIONS = ("ffn.activation", "ffn.expert.activation", "ffn.dense.activation")
_SILU: Tree = dict.fromkeys(_ACTIVATIONS, "silu")
_UNBIASED: Tree = {"attention.qkv_bias": False, "attention.out_bias": False}
_LATENT: Tree = _SILU | {"attention.bias": False, "position.interleaved": True, "position.scaling.kind": (None, "yarn")}
ALLOWED: dict[str, Tree] = {
    **dict.fromkeys(
        (
            "afmoe", "dots1", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "glm4", "glm4_moe", "granite", "granitemoehybrid",
            "hunyuan_v1_moe", "hyperclovax", "internlm3", "iquestcoder", "llama", "mellum", "minimax_m2", "ministral3", "mistral",
            "mixtral", "phi3", "solar_open",
        ),
        _SILU,
    ),
    **dict.fromkeys(
        (
            "cohere", "cohere2", "granitemoe", "granitemoeshared", "hy_v3", "olmo_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
        ),
        _SILU | _UNBIASED,
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT),
    "ernie4_5": _SILU | _UNBIASED | {"ffn.bias": False},
    "falcon": {"ffn.activation": "gelu"},
    "gemma": _UNBIASED | {"ffn.activation": "gelu_tanh"},
    "gemma2": {"ffn.activation": "gelu_tanh"},
    "gpt_oss": {"attention.qkv_bias": True, "attention.global_every": 2, "attention.global_at": None, "ffn.expert.gpt_oss_limit": 7.0},
    "minicpm3": _SILU | {"attention.bias": False},
    "olmoe": _SILU | _UNBIASED | {"ffn.router.normalize": False, "norm.eps": 1e-5},
    "qwen2": _SILU | {"attention.global_every": None},
    "qwen2_moe": _SILU | {"attention.global_every": None, "attention.qkv_bias": True},
    "qwen3": _SILU | {"attention.global_every": None, "attention.out_bias": False},
    "qwen3_moe": _SILU | {"attention.out_bias": False},
    "stablelm": _SILU | {"block.kind": "sequential"},
}  # fmt: skip
"""Values of our options, or tuples of them, that its own classes compute, whatever else config.json says; options that a model does not
have are not looked at."""
DENSE = (
    "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "glm4", "granite", "hyperclovax", "internlm3", "iquestcoder", "llama",
    "ministral3", "mistral", "phi3", "qwen2", "qwen3", "stablelm",
)  # fmt: skip
"""Of these it also runs transformers' class, with its own attention in it (--model-impl transformers)."""


def serve(family: Family, cfg: ModelConfig, folder: Path) -> tuple[str | None, str]:
    """Returns the command that serves the exported folder, or None and why there is none."""
    if cfg.kind != "decoder":
        return None, f"it generates with decoders, and this is an {cfg.kind.replace('_', '-')}"
    if family.name in ABSENT:
        return None, f"it has no {family.architecture}"
    ours = resolved(cfg)
    width = ours.get("attention.head_dim") if "attention" in ours["pattern"] else None
    if width is not None and width not in HEADS:
        return None, f"heads are {width} numbers wide, and it has {', '.join(map(str, HEADS))}"
    command, why = f"vllm serve {shlex.quote(str(folder))}", _lacks(family, ours)
    if why and family.name not in DENSE:
        return None, why
    return f"{command} --model-impl transformers" if why else command, ""


def _lacks(family: Family, ours: Tree) -> str:
    """Returns the first option that vLLM's own class of this family computes otherwise."""
    for option, allowed in ALLOWED.get(family.name, {}).items():
        values = allowed if isinstance(allowed, tuple) else (allowed,)
        if option in ours and not any(alike(ours[option], value) for value in values):
            shown = " or ".join("null" if value is None else str(value).lower() for value in values)
            return f"its {family.architecture} has no model.{option}={str(ours[option]).lower()}, only {shown}"
    return ""
