"""What MLX makes of an exported folder, by the logits of random models in mlx-lm 0.32.2, of whole texts and token by token."""

import shlex
from pathlib import Path

from lm.hf.io.family import Family
from lm.hf.io.rules import SILU, UNBIASED, unlike
from lm.schema import Tree

_SCALED: Tree = SILU | {
    "position.scaling.kind": (None, "linear", "llama3", "yarn"),
    "position.scaling.attention_factor": None,
    "position.scaling.mscale": None,
    "position.scaling.mscale_all_dim": None,
    "position.scaling.truncate": True,
    "position.none_at": None,
}
_UNSCALED: Tree = SILU | {"position.scaling.kind": None}
_UNTIED: Tree = _UNSCALED | {"head.tied": False}
_UNWINDOWED: Tree = {"attention.window": None}
ALLOWED: dict[str, Tree] = {
    **dict.fromkeys(("exaone4", "granite", "granitemoe", "iquestcoder", "llama", "olmo2", "olmoe", "seed_oss", "smollm3"), _SCALED),
    **dict.fromkeys(("ministral3", "mistral"), _SCALED | _UNWINDOWED),
    **dict.fromkeys(("ernie4_5", "hunyuan_v1_dense"), _UNSCALED),
    **dict.fromkeys(("mixtral", "phi3"), _UNSCALED | _UNWINDOWED),
    **dict.fromkeys(("glm4", "helium", "stablelm"), _UNTIED),
    "cohere": _UNSCALED | {"head.tied": True},
    "cohere2": _UNSCALED | {"head.tied": True, "attention.global_every": 4, "position.none_every": 4, "position.none_at": None},
    "glm": _UNSCALED | {"position.fraction": 1.0},
    "internlm3": _SCALED | {"position.scaling.kind": (None, "linear"), "ffn.bias": False},
    "qwen2": _SCALED | _UNWINDOWED | {"attention.qkv_bias": True},
    "qwen3": _SCALED | _UNWINDOWED | UNBIASED,
    "qwen3_moe": _UNSCALED | _UNWINDOWED | UNBIASED,
}
"""What its classes compute, whatever else config.json says: of most, most other values change the logits without a word."""
SQUARE = ("cohere", "cohere2", "granite", "granitemoe", "helium", "internlm3", "mixtral", "phi3", "qwen2", "smollm3", "stablelm")
"""All heads of these together are as wide as the model."""


def generate(family: Family, ours: Tree, folder: Path) -> tuple[str | None, str]:
    """Returns the command that continues a text with the exported folder, or None and why there is none."""
    if family.name not in ALLOWED:
        return None, f"it has no {family.architecture} that is known to compute the same"
    if why := unlike(ours, ALLOWED[family.name], family.name in SQUARE):
        return None, f"its {family.architecture} has no {why}"
    if family.name == "exaone4" and ours["attention.window"] is not None and ours["attention.global_every"] is None:
        return None, f"its {family.architecture} has no model.attention.window={ours['attention.window']} in all layers"
    return f"mlx_lm.generate --model {shlex.quote(str(folder))} --prompt TEXT", ""
