"""Seed-OSS.  ByteDance Seed 2025, "Seed-OSS Open-Source Models"."""

from lm.hf.families.llama import Llama


class SeedOss(Llama):
    """Llama whose projections in and out of the heads have biases, or not, each by themselves."""

    name = "seed_oss"
    architecture = "SeedOssForCausalLM"
    rare = True
    fields = {
        **Llama.fields,
        "attention.n_kv_heads": ("num_key_value_heads", 8),
        "attention.head_dim": ("head_dim", 128),
        "attention.qkv_bias": ("attention_bias", True),
        "attention.out_bias": ("attention_out_bias", False),
        "attention.dropout": ("attention_dropout", 0.1),
        "dropout": ("residual_dropout", 0.1),
    }


FAMILY = SeedOss()
