"""A server in a thread of this process, for a tiny random model."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from lm.data.kinds import BytesConfig
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.nn.transformer import LM, DecoderLM
from lm.schema import from_tree
from lm.serving.config import ServeConfig
from lm.serving.run import Server, listening
from tests.nn.models import config, redrawn

TEMPLATE = Path("lm/data/tokenizer/chat_templates/plain.jinja")
Serve = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    found = BytesConfig().build()
    found.chat_template = (Path(__file__).parents[2] / TEMPLATE).read_text() + "{{ tools | length if tools }}"
    return found


@pytest.fixture(scope="session")
def model() -> DecoderLM:
    torch.set_num_threads(1)
    return redrawn(config(vocab_size=320, max_seq_len=256))


@pytest.fixture(scope="session")
def serve(model: DecoderLM, tokenizer: Tokenizer) -> Serve:
    @contextmanager
    def serving(served: LM = model, spoken: Tokenizer = tokenizer, **options: object) -> Iterator[httpx.Client]:
        cfg = from_tree(ServeConfig, {"port": 0, "tokens": 4096, **options})
        server = Server(served, spoken, "tiny", cfg)
        with listening(cfg) as listener:
            thread = threading.Thread(target=server.run, args=([listener],))
            thread.start()
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
                    yield client
            finally:
                server.should_exit = True
                thread.join()

    return serving


@pytest.fixture(scope="session")
def client(serve: Serve) -> Iterator[httpx.Client]:
    with serve() as found:
        yield found
