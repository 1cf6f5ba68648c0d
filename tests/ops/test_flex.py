"""FlexAttention, run eagerly on CPU, equals the reference; its gradients are tests/gpu's, since torch has none on CPU."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lm.nn.batch import Batch
from lm.nn.mixers.grouped import GQA
from lm.nn.transformer import DecoderLM
from lm.ops.attention.attend import Scoring, reference, sdpa
from lm.ops.attention.flex import Flex, compiled_flex, why_not_flex
from lm.ops.attention.mask import Mask, arange_positions
from lm.testing.models import tokens
from lm.training.deterministic import deterministic
from tests.nn.models import config, near, packed, redrawn

EAGER = Flex(flex_attention, create_block_mask)
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def afresh() -> None:
    """What torch traces of the kernel where it runs eagerly: from torch 2.15 on, heads of many numbers end in an error of its own."""
    torch.compiler.reset()


def never(*args: object, **options: object) -> object:
    raise AssertionError("flex was called")


def masks() -> dict[str, Mask]:
    """One row, or two: three documents, and left padding before two documents."""
    row = arange_positions(140, CPU)  # more than one block of 128
    lengths = [[60, 50, 30], [20, 70, 50]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in lengths])
    positions[1, :20], documents[1, :20] = -1, -1
    return {
        "plain": Mask(row, row, square=True),
        "documents and padding": Mask(positions, positions, documents, documents),
        "both ways": Mask(positions, positions, documents, documents, causal=False),
        "prefix": Mask(positions, positions, documents, documents, k_prefix=positions % 40 < 9),
        "prefix of plain rows": Mask(row, row, square=True, k_prefix=row < 30),
    }


def inputs(heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 140, 16, generator=source) for h in (heads[0], heads[1], heads[1]))
    return q, k, v


@pytest.mark.parametrize("name", ["plain", "documents and padding", "both ways", "prefix", "prefix of plain rows"])
@pytest.mark.parametrize(
    ("window", "softcap", "chunked"), [(None, None, False), (None, 2.0, False), (7, None, False), (130, 2.0, False), (17, None, True)]
)
@pytest.mark.parametrize("heads", [(4, 1), pytest.param((4, 4), marks=pytest.mark.slow)])
def test_flex_equals_the_reference(name: str, window: int | None, softcap: float | None, chunked: bool, heads: tuple[int, int]) -> None:
    q, k, v = inputs(heads)
    how = Scoring(0.3, window, softcap, chunked=chunked)
    fast, plain = EAGER(q, k, v, masks()[name], None, how), reference(q, k, v, masks()[name], None, how)
    near(fast, plain)
    if "plain" not in name:
        assert (fast[1, :, :20] == 0).all()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", [(2, 4, 140, 140), (1, 4, 1, 140), (1, 1, 140, 140)])
def test_flex_adds_a_bias_after_the_soft_cap(softcap: float | None, shape: tuple[int, ...]) -> None:
    q, k, v = inputs((4, 2))
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    mask, how = masks()["documents and padding"], Scoring(0.3, 50, softcap)
    near(EAGER(q, k, v, mask, bias, how), reference(q, k, v, mask, bias, how))


def test_the_block_mask_is_built_once_per_window() -> None:
    built = []

    def counted(*args: Any, **options: Any) -> object:
        built.append(args)
        return create_block_mask(*args, **options)

    flex, mask = Flex(flex_attention, counted), masks()["plain"]
    for window in (7, None, 7, None):
        flex(*inputs((4, 4)), mask, None, Scoring(0.3, window, 2.0))
    assert len(built) == 2


def test_rows_of_all_widths_are_of_a_few_kinds() -> None:
    """Each is compiled, for seconds; beyond torch's limit a kind would run uncompiled, with the scores of all pairs in memory."""
    kinds = set[tuple[int, ...]]()

    def counted(q: Tensor, k: Tensor, v: Tensor, *further: object, **options: object) -> Tensor:
        kinds.add((q.shape[2], k.shape[2], v.shape[2]))
        return q

    flex = Flex(counted, lambda sees, b, h, n, m, device: kinds.add((n, m, m)))
    for s in range(1, 1025):
        row = arange_positions(s, CPU)
        x = torch.empty(1, 1, s, 16)
        assert flex(x, x, x, Mask(row, row), None, Scoring(0.3)).shape == x.shape
    assert kinds == {(n, n, n) for n in (128, 192, 256, 384, 512, 768, 1024)}
    with torch._dynamo.config.patch(recompile_limit=8):
        compiled_flex.__wrapped__()
        assert torch._dynamo.config.recompile_limit == 64


def with_flex(model: DecoderLM) -> DecoderLM:
    """The backend that a CUDA device would choose, without its compiler."""
    for module in model.modules():
        if isinstance(module, GQA):
            module.attend = EAGER
    return model


def test_plain_rows_are_on_flex_where_steps_repeat_to_the_bit() -> None:
    """torch's kernels for them add up the gradient of the queries in no fixed order."""
    q, k, v = inputs((4, 2))
    how, mask, alone = Scoring(0.3), masks()["plain"], Flex(never, never)
    near(alone(q, k, v, mask, None, how), reference(q, k, v, mask, None, how))
    with deterministic(True):
        near(EAGER(q, k, v, mask, None, how), reference(q, k, v, mask, None, how))
        with pytest.raises(AssertionError, match="flex was called"):
            alone(q, k, v, mask, None, how)
        with torch.no_grad():
            near(alone(q, k, v, mask, None, how), reference(q, k, v, mask, None, how))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("softcap", [None, pytest.param(8.0, marks=pytest.mark.slow)])
def test_a_model_on_flex_equals_one_on_the_reference(softcap: float | None) -> None:
    attention = {"n_heads": 2, "n_kv_heads": 1, "window": 5, "global_every": 2, "softcap": softcap, "qk_norm": "head"}
    model = redrawn(config(attention=attention, norm={"kind": "layer"}))
    batch = packed([9, 3, 20])
    batch.tokens, batch.positions, batch.documents = (
        t.repeat(2, 1) for t in (batch.tokens, cast(Tensor, batch.positions), cast(Tensor, batch.documents))
    )
    for given in (batch, Batch(tokens(3, 40))):
        expected = model(given)
        assert expected.std() > 0.5
        near(with_flex(redrawn(model.cfg))(given), expected)


NOWHERE = [
    ({"attention": {"n_heads": 2, "window": 5, "global_every": 2}}, 1),  # a plain mask without a window is no block mask
    ({"attention": {"n_heads": 2, "softcap": 5.0}}, 1),
    ({"attention": {"n_heads": 2}, "position": {"kind": "alibi"}}, 1),
    ({"attention": {"n_heads": 2, "window": 5}, "position": {"kind": "t5_relative"}}, 0),  # learned, and not for flex
    ({"attention": {"n_heads": 2, "window": 5, "global_every": 4}, "n_layers": 3, "mtp": {"depth": 1}}, 1),
]


@pytest.mark.parametrize(("changes", "n"), NOWHERE, ids=str)
def test_blocks_of_a_mask_are_built_outside_of_what_is_compiled(changes: dict[str, Any], n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are as they are: what would be compiled are they alone, and there nothing is built."""
    built, inside = list[bool](), list[bool]()

    def watched(*args: Any, **options: Any) -> object:
        built.append(bool(inside))
        return create_block_mask(*args, **options)

    def run(block: nn.Module, what: str, *given: Any) -> Tensor:
        inside.append(True)
        out: Tensor = block(*given)
        inside.pop()
        return out

    model = redrawn(config(**changes))
    for module in model.modules():
        if isinstance(module, GQA):
            module.attend = Flex(lambda q, k, v, *further, **options: q * 1.0, watched)
    monkeypatch.setattr(torch, "compile", lambda function, *args, **options: run)
    model.compile()
    model.train()(Batch(tokens(3, 40)), read=lambda hidden, head, ctx: ctx.mtp)
    assert built == [False] * n
    cache, n_built = model.new_cache(1, 4), len(built)
    model.eval()(Batch(tokens(1, 4)), cache=cache)
    assert len(built) == n_built  # nor for a prompt that is cached


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_on_flex_equals_the_uncompiled_one() -> None:
    model, given = redrawn(config(attention={"n_heads": 2, "window": 5, "global_every": 2})), Batch(tokens(3, 40))
    expected = model(given)
    with_flex(model).compile(backend="eager")
    near(model(given), expected)


@torch.no_grad()
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_cached_decoding_does_not_wait_for_a_compiler(softcap: float | None) -> None:
    model = redrawn(config(attention={"n_heads": 2, "window": 5, "softcap": softcap}))
    full = model(Batch(tokens(2, 12)))
    for module in model.modules():
        if isinstance(module, GQA):
            module.attend = Flex(never, never)
    cache = model.new_cache(2, 12)
    pieces = [
        model(Batch(tokens(2, 12)[:, i:j], positions=torch.arange(i, j).expand(2, -1)), cache=cache) for i, j in ((0, 7), (7, 8), (8, 12))
    ]
    near(torch.cat(pieces, 1), full)


def test_explicit_masks_and_memories_go_to_other_backends() -> None:
    q, k, v = inputs((4, 2))
    explicit = torch.rand(2, 1, 140, 140, generator=torch.Generator().manual_seed(2)) > 0.5
    row = arange_positions(140, CPU)
    memory = Mask(row, arange_positions(140, CPU), causal=False)
    for mask in (Mask(row, row, square=True, explicit=explicit), memory):
        for how in (Scoring(0.3), Scoring(0.3, softcap=2.0)):
            near(Flex(never, never)(q, k, v, mask, None, how), reference(q, k, v, mask, None, how))


@torch.no_grad()
@pytest.mark.parametrize("position", ["alibi", "t5_relative"])
def test_biases_of_positions_are_the_same_on_flex(position: str) -> None:
    model = redrawn(config(attention={"n_heads": 2}, position={"kind": position}))
    batch = packed([9, 3, 20])
    expected = model(batch)
    near(with_flex(model)(batch), expected)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_bias_that_is_learned_gets_its_gradient_elsewhere(softcap: float | None) -> None:
    q, k, v = inputs((4, 2))
    bias, mask, how = torch.randn(1, 4, 140, 140, requires_grad=True), masks()["documents and padding"], Scoring(0.3, None, softcap)
    fast, plain = Flex(never, never)(q, k, v, mask, bias, how), reference(q, k, v, mask, bias, how)
    near(fast, plain)
    for other in (fast, plain):
        other.sum().backward()
    (gradient,) = torch.autograd.grad(reference(q, k, v, mask, bias, how).sum(), bias)
    near(bias.grad, 2 * gradient)


def test_sinks_keep_a_model_from_flex() -> None:
    assert why_not_flex(CPU, 64, 0.0, sinks=True) == "it has no sinks"
    assert why_not_flex(CPU, 64, 0.1) == "it has no dropout"


def test_moving_a_model_chooses_the_backend_anew() -> None:
    model = with_flex(redrawn(config()))
    model.to("cpu")
    assert all(module.attend is sdpa for module in model.modules() if isinstance(module, GQA))
