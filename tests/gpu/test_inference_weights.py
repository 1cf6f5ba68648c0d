"""Models made ready on a GPU: no matrix stands twice, and what they compute is that of a CPU."""

from collections.abc import Iterator

import pytest
import torch

import lm
from lm.data.tokenizer.config import BytesConfig
from lm.generation.config import Dtype
from lm.generation.weights.prepare import prepare
from lm.nn.transformer import LM, build_model
from lm.testing.models import tokens
from tests.nn.models import config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = "cuda"
NAMES = ["calm", "rough", "none"]
WIDE = {
    "attention": {"n_heads": 2},
    "d_model": 64,
    "ffn": {"hidden": 96},
    "vocab_size": 320,
    "max_seq_len": 400,
}  # heads that FlexAttention takes


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield


def model(dtype: Dtype | None, device: str, **changes: object) -> LM:
    made = build_model(config(**WIDE | changes), seed=0).to(device)
    return made if dtype is None else prepare(made, dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_logits_are_those_of_the_same_numbers_on_a_cpu(dtype: Dtype) -> None:
    """Relative errors of all logits: bf16 keeps 8 bits, and the kernels of a CPU round elsewhere."""
    here, there = (model(dtype, device)(tokens(2, 30).to(device)).float().cpu() for device in ("cpu", GPU))
    assert float((there - here).norm() / here.norm()) < 3e-2


@pytest.mark.parametrize("dtype", ["saved", "bf16", "int8"])
def test_a_matrix_is_freed_when_it_has_been_replaced(dtype: Dtype) -> None:
    plain = model(None, GPU, d_model=256, n_layers=16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prepare(plain, dtype)
    assert torch.cuda.max_memory_allocated() < 1.3 * before
    assert torch.cuda.memory_allocated() < {"saved": 1.1, "bf16": 0.7, "int8": 0.5}[dtype] * before


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_texts_of_all_lengths_are_told_apart_as_on_a_cpu_by_few_kernels(dtype: Dtype | None) -> None:
    head = config(**WIDE).head.telling(NAMES, bias=False).tree()
    texts = ["x" * n for n in range(1, 400, 9)]
    here, there = (lm.classify(model(dtype, device, head=head), BytesConfig().build(), texts) for device in ("cpu", GPU))
    for one, other in zip(there, here, strict=True):
        assert one == pytest.approx(other, abs=1e-4 if dtype is None else 2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # masks and attention of 512 tokens and of 128
