"""IQuest-Coder-V1, without loops.  IQuest 2025, "IQuest-Coder-V1 Technical Report"."""

from lm.hf.families.llama import Llama


class IQuestCoder(Llama):
    """Llama of other usual sizes."""

    name = "iquestcoder"
    fields = {
        **Llama.fields,
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "attention.head_dim": ("head_dim", 128),
    }
    fixed_there = {"clip_qkv": None, "use_sliding_window": False}
    idle = ("sliding_window", "max_window_layers")


FAMILY = IQuestCoder(even_heads=True)
