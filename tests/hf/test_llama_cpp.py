"""llama.cpp on files of ours: tokens of odd texts, logits, greedy text. Needs llama-cpp-python, which is built from source."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.generation.config import SamplingConfig
from lm.nn.batch import Batch
from lm.nn.ffn.mlp import ACTIVATIONS
from tests.generation.drawing import generate
from tests.hf.gguf_models import FAMILIES, MODELS, ODD, built, trained, written

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install llama-cpp-python builds it)")
pytestmark = pytest.mark.slow

SCRIPTS = [
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x5D0, 0x6FF), (0x900, 0xDFF), (0x2000, 0x206F), (0x2100, 0x218F),
    (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFF00, 0xFFEF), (0x1F300, 0x1F6FF), (0x1D400, 0x1D7FF), (0x2460, 0x24FF),
    (0, 31),
]  # fmt: skip
LIMITS = {"f32": 1e-3, "f16": 0.05, "bf16": 0.4, "q8_0": 1.0}  # of logits of std 1 to 4; q8_0 rounds what is multiplied too
CASES = [*((name, "f32") for name in MODELS), *(("llama", dtype) for dtype in ("f16", "bf16", "q8_0"))]


@contextmanager
def opened(file: Path, **options: Any) -> Iterator[Any]:
    exact = {"type_k": 0, "type_v": 0, "flash_attn": False}  # keys and values in float32
    model = llama_cpp.Llama(str(file), n_ctx=128, n_batch=128, n_threads=1, verbose=False, **exact, **options)
    yield model
    model.close()


def tabled_gelu(x: Tensor) -> Tensor:
    """As llama.cpp has it on CPUs: of half precision, and rounded to it."""
    return torch.where(x.abs() < 10, F.gelu(x.half().float(), approximate="tanh").half().float(), F.relu(x))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_logits_and_greedy_text_are_the_same(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "gelu_tanh", tabled_gelu)
    ours = built(name)
    ids = torch.randint(0, 259, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = ours(Batch(ids[None]))[0]
    prompt = ids[:9].tolist()
    [text] = generate(ours, [prompt], SamplingConfig(max_tokens=50, temperature=0.0))
    with opened(written(tmp_path, ours, trained("bytes"), dtype, FAMILIES.get(name)), logits_all=True) as theirs:
        theirs.eval(ids.tolist())
        found = torch.tensor(np.array(theirs.scores[:60]))
        theirs.reset()
        tokens = theirs.generate(prompt, temp=0.0, repeat_penalty=1.0, top_k=1)
        said = [next(tokens) for _ in range(50)]
    assert expected.std() > 1
    assert (found - expected).abs().max() <= LIMITS[dtype]
    assert said == text or dtype != "f32"


def odd_text(source: random.Random) -> str:
    pieces = [*ODD, "'s", "'LL", "'re ", "\r\n", "\t", " ", "  ", "\u2003", "1", "22", "4444"]
    parts = [source.choice(pieces) for _ in range(source.randrange(1, 20))]
    for at in range(0, len(parts), 2):
        low, high = source.choice(SCRIPTS)
        parts[at] = "".join(chr(source.randint(low, high)) for _ in range(source.randrange(1, 6)))
    return "".join(parts)


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4", "qwen2", "bytes"])
def test_odd_texts_have_the_same_tokens(pattern: str, tmp_path: Path) -> None:
    source, tokenizer = random.Random(0), trained(pattern)
    texts = [*ODD, *(odd_text(source) for _ in range(1000))]
    with opened(written(tmp_path, built("llama"), tokenizer), vocab_only=True) as theirs:
        found = [theirs.tokenize(text.encode(), add_bos=False, special=False) for text in texts]
        assert found == [tokenizer.encode(text) for text in texts]
        assert theirs.tokenize(b"a", add_bos=True)[:-1] == tokenizer.prefix
