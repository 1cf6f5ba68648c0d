"""FlexAttention compiled for the GPU equals the reference, gradients included."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lm.nn.batch import Batch
from lm.nn.mixers.grouped import GQA
from lm.nn.transformer import DecoderConfig, build_model
from lm.ops.attention.attend import Attend, Scoring, choose, reference, sdpa
from lm.ops.attention.flex import Flex, compiled_flex, why_not_flex
from lm.ops.attention.mask import Mask, arange_positions
from lm.ops.compiling import CAPABILITY
from lm.schema import from_tree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = torch.device("cuda")
LENGTH = 300  # more than two blocks of 128, and no multiple of one


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Without it, after eight variants of one function torch runs the next ones eagerly."""
    torch._dynamo.reset()
    yield


def masks() -> dict[str, Mask]:
    """One row, or two: three documents, and left padding before two documents."""
    row = arange_positions(LENGTH, GPU)
    lengths = [[60, 140, 100], [20, 180, 100]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in lengths])
    positions[1, :20], documents[1, :20] = -1, -1
    positions, documents = positions.to(GPU), documents.to(GPU)
    return {
        "plain": Mask(row, row, square=True),
        "documents": Mask(positions, positions, documents, documents),
        "both ways": Mask(positions, positions, documents, documents, causal=False),
    }


def attended(attend: Attend, mask: Mask, how: Scoring, inputs: list[Tensor], bias: Tensor | None = None) -> list[Tensor]:
    """The output, and the gradients of a fixed sum of it by the inputs; in float32."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = attend(q, k, v, mask, bias, how)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    return [x.float() for x in (out, *torch.autograd.grad((out * weight).sum(), (q, k, v)))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "window", "softcap", "heads", "head_dim"),
    [
        ("documents", None, None, (4, 4), 64),
        ("documents", 7, None, (4, 2), 64),
        ("documents", None, 2.0, (4, 1), 16),
        ("documents", 150, 30.0, (6, 2), 128),
        ("plain", 7, None, (4, 4), 128),
        ("plain", None, 2.0, (4, 2), 64),
        ("both ways", 130, 2.0, (4, 2), 96),
    ],
)
def test_compiled_flex_equals_the_reference(
    name: str, window: int | None, softcap: float | None, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    """Relative errors of whole tensors: bf16 keeps 8 bits, and the kernel rounds weights and their gradients to it."""
    source = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, h, LENGTH, head_dim, generator=source).to(GPU, dtype) for h in (heads[0], heads[1], heads[1])]
    how, mask = Scoring(head_dim**-0.5, window, softcap), masks()[name]
    exact = attended(reference, mask, how, [x.float() for x in inputs])
    fast = attended(compiled_flex(), mask, how, inputs)
    for label, a, b in zip(("out", "dq", "dk", "dv"), fast, exact, strict=True):
        error = float((a - b).norm() / b.norm())
        assert error < (1e-4 if dtype == torch.float32 else 3e-2), (label, error)
    if name != "plain":
        assert all((x[1, :, :20] == 0).all() for x in fast)


def test_compiled_flex_adds_a_bias() -> None:
    source = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 4, LENGTH, 32, generator=source).to(GPU) for _ in range(3)]
    bias = torch.randn(1, 4, LENGTH, LENGTH, generator=source).to(GPU)
    mask, how = masks()["documents"], Scoring(0.2, None, 5.0)
    fast, exact = attended(compiled_flex(), mask, how, inputs, bias), attended(reference, mask, how, inputs, bias)
    torch.testing.assert_close(fast, exact, atol=1e-4, rtol=1e-3)


def test_the_backend_on_a_gpu_says_why() -> None:
    assert isinstance(choose(GPU, 64, Scoring(1.0, softcap=30.0)), Flex) or torch.cuda.get_device_capability() < CAPABILITY
    for head_dim, dropout, word in ((8, 0.0, "head_dim=8"), (64, 0.1, "dropout")):
        assert choose(GPU, head_dim, Scoring(1.0, dropout=dropout)) is sdpa
        assert word in str(why_not_flex(GPU, head_dim, dropout))


@torch.no_grad()
@pytest.mark.parametrize("documents", [False, True])
def test_a_model_moved_to_the_gpu_and_back_gives_the_same_logits(documents: bool) -> None:
    tree = {
        "vocab_size": 61, "max_seq_len": 64, "d_model": 64, "n_layers": 2, "norm": {"kind": "rms"}, "position": {"kind": "rope"},
        "attention": {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "window": 9, "global_every": 2},
        "ffn": {"kind": "mlp", "hidden": 40}, "init": {"std": 0.2},
    }  # fmt: skip
    model = build_model(from_tree(DecoderConfig, tree), seed=0).eval()
    batch = Batch(torch.randint(0, 61, (3, 64), generator=torch.Generator().manual_seed(0)))
    if documents:
        places = torch.arange(64).expand(3, -1)
        batch.positions, batch.documents = places % 32, places // 32
    expected = model(batch)
    moved = model.to(GPU)(batch.to(GPU))
    torch.testing.assert_close(moved.cpu(), expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(model.to("cpu")(batch), expected)
    assert all(module.attend is sdpa for module in model.modules() if isinstance(module, GQA))
