"""Which families SGLang has a class for, by the source of its release 0.5.23; docs/serving.md says what else was read of it."""

ABSENT = (
    "bamba", "biogpt", "bloom", "codegen", "cwm", "diffllama", "dots1", "ernie4_5", "falcon", "flex_olmo", "glm", "gpt_neo", "gpt_neox",
    "helium", "hyperclovax", "jais2", "jamba", "ministral", "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo3", "olmo_hybrid",
    "openai-gpt", "recurrent_gemma", "seed_oss", "smollm3", "solar_open", "vaultgemma", "xglm", "youtu",
)  # fmt: skip
"""Decoders that no EntryClass in sglang/srt/models names; for them it tries transformers' class."""
UNCHECKED = ("axk1", "kimi_linear", "mistral4")
"""Decoders that came here since, and were not looked up."""
