"""What vLLM makes of an exported folder, by the source of its release 0.33 (vllm/model_executor/models).

For each family tiny random exports were also loaded by its own code and classes on a CPU (2026-11-28), with attention, routing and experts
written out in torch in place of its kernels: logits are ours up to rounding where a command is given. Of recurrent layers only the loading
was tried.
"""

import shlex
from pathlib import Path

from lm.hf.io.family import Family
from lm.hf.io.rules import SILU, UNBIASED, unlike
from lm.nn.parts import ATTENDING
from lm.schema import Tree

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What --max-lora-rank takes (vllm/config/lora.py)."""
MAX_RANK = 16
"""Its default."""
HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths that its attention on CPUs takes (vllm/v1/attention/backends/cpu_attn.py); its kernels for GPUs have fewer and larger ones."""
ABSENT = ("bamba", "codegen", "diffllama", "gpt_neo", "modernbert-decoder", "mpt", "openai-gpt", "recurrent_gemma", "xglm")
"""It has none of these (of some: no more), and in a layer of their classes in transformers it finds no attention that it could replace, or
for ModernBERT's decoder none of the names of its weights."""
UNCHECKED = (
    "axk1", "deepseek_v32", "exaone", "gemma4_text", "gemma4_unified_text", "glm_moe_dsa", "granite_swa", "granitemoe_swa", "kimi_linear",
    "kolibri1", "lfm3", "mistral4", "sarvam_mla", "sarvam_moe",
)  # fmt: skip
"""Whether it has these, and computes the same, was not looked at, here or in SGLang."""
_TIED: Tree = {"head.tied": True}
_UNTIED: Tree = {"head.tied": False}
_LATENT: Tree = SILU | {"attention.bias": False, "position.interleaved": True, "position.scaling.kind": (None, "yarn")}
ALLOWED: dict[str, Tree] = {
    **dict.fromkeys(
        (
            "dots1", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "glm4", "granite", "granitemoehybrid", "hunyuan_v1_moe",
            "hyperclovax", "internlm3", "iquestcoder", "llama", "mellum", "ministral3", "mistral", "mixtral", "phi3", "solar_open",
        ),
        SILU,
    ),
    **dict.fromkeys(("afmoe", "glm4_moe", "jamba", "minimax_m2"), SILU | _UNTIED),
    **dict.fromkeys(("biogpt", "bloom", "lfm2", "lfm2_moe"), _TIED),
    "gptj": _UNTIED,
    **dict.fromkeys(
        (
            "granitemoe", "granitemoeshared", "hy_v3", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text",
        ),
        SILU | UNBIASED,
    ),
    "cohere": SILU | UNBIASED | _TIED,
    "cohere2": SILU | UNBIASED | _TIED | {"attention.window": None},
    "qwen3_next": SILU | UNBIASED | _UNTIED,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT | _UNTIED),
    "ernie4_5": SILU | UNBIASED | {"ffn.bias": False},
    "falcon_h1": SILU | UNBIASED | {"ffn.bias": False},
    "falcon": {"ffn.activation": "gelu"},
    "gemma": UNBIASED | {"ffn.activation": "gelu_tanh"},
    "gemma2": _TIED | {"ffn.activation": "gelu_tanh"},
    "gpt_oss": _UNTIED | {
        "attention.qkv_bias": True, "attention.global_every": 2, "attention.global_at": None, "ffn.expert.gpt_oss_limit": 7.0,
    },
    "llama4_text": SILU | UNBIASED | {"attention.chunked": True, "attention.global_at": None, "ffn.first_dense": 0},
    "minicpm3": SILU | {"attention.bias": False},
    "nemotron_h": {"ffn.activation": "relu2", "ffn.expert.activation": "relu2", "recurrent.step_floor": 0.0},
    "olmoe": SILU | UNBIASED | _UNTIED | {"ffn.router.normalize": False, "norm.eps": 1e-5},
    "qwen2": SILU | {"attention.global_every": None},
    "qwen2_moe": SILU | {"attention.global_every": None, "attention.qkv_bias": True},
    "qwen3": SILU | {"attention.global_every": None, "attention.out_bias": False},
    "qwen3_moe": SILU | {"attention.out_bias": False},
    "stablelm": SILU | {"block.kind": "sequential"},
}  # fmt: skip
"""What its own classes compute, whatever else config.json says. A head that must not be tied has there a matrix of its own, which no file
fills and nothing reports; one that must be is the embedding, whatever head is in the file. A window of its Cohere2 has one token more."""
_UNREAD: Tree = {"attention.query_growth.rate": None}
"""What its classes of dense decoders and of mixtures leave unread: Ministral 3's growth of queries; and a factor given beside LongRoPE."""
SQUARE = ("jamba",)
"""All heads of these together are as wide as the model."""
_NOTHING: Tree = {}
_SILU_EXPERTS: Tree = {"ffn.expert.activation": "silu"}
THEIRS: dict[str, Tree] = {
    **dict.fromkeys(
        (
            "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "glm4", "granite", "hyperclovax", "internlm3", "iquestcoder",
            "llama", "ministral3", "mistral", "phi3", "qwen2", "qwen3", "stablelm",
        ),
        _NOTHING,
    ),
    **dict.fromkeys(
        (
            "afmoe", "deepseek_v2", "deepseek_v3", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hy_v3", "minimax_m2", "mixtral", "olmoe",
            "qwen3_moe",
        ),
        _SILU_EXPERTS,
    ),
    "gpt_oss": {"ffn.expert.gpt_oss_limit": 7.0},
}  # fmt: skip
"""Of these it also runs transformers' class, with its own attention in it (--model-impl transformers), and its own experts: what these
compute, whatever else config.json says."""


def serve(family: Family, ours: Tree, folder: Path) -> tuple[str | None, str]:
    """Returns the command that serves the exported folder, or None and why there is none."""
    if family.name in ABSENT:
        return None, f"it has no {family.architecture}"
    if family.name in UNCHECKED:
        return None, f"whether it has {family.architecture} and computes the same was not checked"
    if ours.get("position.scaling.kind") == "proportional":
        return None, "whether it has model.position.scaling.kind=proportional was not checked"
    if ours.get("position.none_at") is not None:
        return None, f"whether it has model.position.none_at={ours['position.none_at']} was not checked"
    width = ours.get("attention.head_dim") if {*ATTENDING} & {*ours["pattern"]} else None
    if width is not None and width not in HEADS:
        return None, f"heads are {width} numbers wide, and it has {', '.join(map(str, HEADS))}"
    command, why = f"vllm serve {shlex.quote(str(folder))}", unlike(ours, _rules(family, ours), family.name in SQUARE)
    if family.name == "llama4_text" and ours["attention.global_every"] != ours["position.none_every"]:
        why = why or "chunks elsewhere than in the layers that rotate"
    if why and (family.name not in THEIRS or unlike(ours, THEIRS[family.name])):
        return None, f"its {family.architecture} has no {why}"
    return f"{command} --model-impl transformers" if why else command, ""


def _rules(family: Family, ours: Tree) -> Tree:
    unread = _UNREAD | ({"position.scaling.attention_factor": None} if ours.get("position.scaling.kind") == "longrope" else {})
    return ALLOWED.get(family.name, {}) | (unread if family.name in THEIRS else {})


def rank_for(rank: int) -> int | None:
    """Returns the --max-lora-rank that an adapter of this rank needs, or None where vLLM takes no such rank."""
    return next((most for most in RANKS if most >= rank), None)
