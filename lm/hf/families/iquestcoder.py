"""IQuest-Coder-V1, without loops.  IQuest 2025, "IQuest-Coder-V1 Technical Report"."""

from typing import Any, ClassVar

from lm.hf.families.llama import Llama
from lm.schema import Tree


class IQuestCoder(Llama):
    """Llama of other usual sizes."""

    name = "iquestcoder"
    fields: ClassVar[dict[str, str | tuple[str, Any]]] = {
        **Llama.fields,
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "attention.head_dim": ("head_dim", 128),
    }
    fixed_there: ClassVar[Tree] = {"clip_qkv": None, "use_sliding_window": False}
    idle: ClassVar[tuple[str, ...]] = ("sliding_window", "max_window_layers")


FAMILY = IQuestCoder(even_heads=True)
