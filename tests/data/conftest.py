from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from lm.data.kinds import BytesConfig, TextConfig
from lm.data.store.prepare import Prepared, prepare
from lm.data.store.shards import ShardWriter, TokenStore, write_index
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import EncoderDecoderConfig
from lm.schema import from_tree
from lm.testing.models import BASE
from tests.nn.models import config, with_kinds

Prepare = Callable[..., Prepared]
MakeStore = Callable[..., TokenStore]


@pytest.fixture(scope="session")
def decoder() -> ModelConfig:
    return config()


@pytest.fixture(scope="session")
def encoder_decoder() -> ModelConfig:
    return from_tree(EncoderDecoderConfig, with_kinds(BASE | {"kind": "encoder_decoder"}))


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return BytesConfig().build()


@pytest.fixture
def prepare_text(tmp_path: Path) -> Prepare:
    """prepare() of local files with a cache of the test's own and byte tokens."""

    def run(files: Any, tokenizer: Any = None, **options: Any) -> Prepared:
        given = [str(file) for file in files] if isinstance(files, list) else str(files)
        cfg = TextConfig(files=given, cache_dir=str(tmp_path / "cache"), **options)
        return prepare(cfg, tokenizer or BytesConfig(), log=lambda line: None)

    return run


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """A store of the given documents (lists of token ids) as they are, in shards of `shard_tokens`."""

    def run(documents: list[list[int]], vocab_size: int = 1000, shard_tokens: int = 1 << 20) -> TokenStore:
        folder = Path(mkdtemp(dir=tmp_path)) if (tmp_path / "index.json").exists() else tmp_path
        writer = ShardWriter(folder, "train", vocab_size, shard_tokens)
        for document in documents:
            writer.start_document()
            writer.add(np.array(document, np.uint32), n_bytes=len(document))
        write_index(folder, {"splits": {"train": writer.close()}})
        return TokenStore(folder, "train")

    return run
