"""A folder in Hugging Face's format."""

from pathlib import Path

import pytest

from lm.data.kinds import BytesConfig


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A Llama in Hugging Face's format, written by transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
    folder = tmp_path / "theirs"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    BytesConfig().build().save(folder)
    return folder
