from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lm.data.kinds import BytesConfig
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.transformer import DecoderLM
from lm.storage.model_folder import save_model
from tests.nn.models import config, redrawn

Save = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return BytesConfig().build()


@pytest.fixture(scope="session")
def model() -> DecoderLM:
    """Random, 320 rows of embedding for the 259 tokens, 48 places of context and no more."""
    return redrawn(config(vocab_size=320, position={"kind": "learned"}))


@pytest.fixture
def model_folder(tmp_path: Path, model: DecoderLM, tokenizer: Tokenizer) -> Path:
    folder = tmp_path / "runs" / "x" / "model"
    save_model(folder, model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    return folder


@pytest.fixture
def save(tmp_path: Path, tokenizer: Tokenizer) -> Save:
    """A folder with a random model of a seed, and of what differs from the small one of the tests."""

    def run(name: str, seed: int, **model: object) -> Path:
        found = redrawn(config(vocab_size=320, **model), seed)
        save_model(tmp_path / name, found.cfg.tree(), dict(found.named_parameters()), tokenizer.save, {})
        return tmp_path / name

    return run
