"""Chunked loss = plain loss; the whole batch's logits never exist at once; the split into micro-batches changes nothing."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from lm.losses.cross_entropy import losses_and_gradient, token_losses
from lm.losses.tokens import causal_reader, chunked_loss
from lm.nn.batch import IGNORED, Batch
from lm.nn.head import WIDE_CPU, Head, HeadConfig
from lm.nn.norm import RMSNormConfig
from lm.nn.transformer import DecoderConfig, build_model
from lm.ops.entropy import entropy_
from lm.ops.linear import product
from lm.ops.ranks.vocabulary import Vocabulary
from lm.schema import from_tree
from tests.nn.models import near


class Times(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


TINY = {
    "vocab_size": 97, "max_seq_len": 16, "d_model": 16, "n_layers": 2, "norm": {"kind": "rms"}, "position": {"kind": "rope"},
    "attention": {"kind": "gqa", "n_heads": 2}, "ffn": {"kind": "mlp", "hidden": 24},
}  # fmt: skip


def ragged_labels(b: int, s: int, v: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    labels = torch.randint(0, v, (b, s), generator=source)
    labels[torch.rand(b, s, generator=source) < 0.4] = IGNORED
    labels[0] = IGNORED
    return labels


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"label_smoothing": 0.1, "z_loss": 0.01}])
def test_chunked_loss_equals_plain_loss_with_gradients(options: dict[str, float], softcap: float | None) -> None:
    torch.manual_seed(0)
    head = Head(HeadConfig(softcap=softcap), RMSNormConfig(), 16, 97)
    hidden = torch.randn(50, 16, requires_grad=True)
    labels = ragged_labels(5, 10, 97).flatten()
    results = []
    for chunk in (7, 50, 1000):
        sums = chunked_loss(hidden, labels, head, chunk=chunk, **options)
        results.append([sums.total, sums.nll, *torch.autograd.grad(sums.total * 0.3, (hidden, head.weight))])
    plain = token_losses(head(hidden), labels, **options)
    expected = [plain.total, plain.nll, *torch.autograd.grad(plain.total * 0.3, (hidden, head.weight))]
    for result in results:
        for found, wanted in zip(result, expected, strict=True):
            near(found, wanted)
    by_hand = -F.log_softmax(head(hidden), -1)[torch.arange(50), labels.clamp_min(0)]
    near(expected[1], (by_hand * (labels != IGNORED)).sum())


@pytest.mark.parametrize("learning", [True, False])
def test_the_head_reads_few_places_that_have_no_label(learning: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the labels are counted: by the loss, or by the batch that was moved to a device."""
    labels = torch.where(torch.rand(6, 200) < 0.15, torch.randint(0, 97, (6, 200)), IGNORED)
    moved, n = Batch(labels, labels).to("meta"), int((labels != IGNORED).sum())
    assert moved.labels is not None and moved.n_labels(moved.labels) == n and moved.n_labels(labels) is None
    monkeypatch.setattr("lm.nn.head.product", lambda x, *others: (read.append(len(x)), product(x, *others))[1])
    for device, most in (("cpu", None), ("meta", n), ("meta", None)):
        read: list[int] = []
        with torch.set_grad_enabled(learning), torch.device(device):
            chunked_loss(torch.randn(6, 200, 16), labels.to(device), Head(HeadConfig(), RMSNormConfig(), 16, 97), chunk=50, n_labels=most)
        assert max(read) == 50 and n <= sum(read) < {("cpu", None): 1.125 * n, ("meta", n): n + 50, ("meta", None): 1201}[device, most]
        assert device == "cpu" or {*read} == {50}  # another number would be compiled for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_written_gradient_of_the_logits_is_autograds(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(50, 97).mul(3).to(dtype).requires_grad_(), ragged_labels(5, 10, 97).flatten()
    plain = token_losses(logits, labels, label_smoothing=0.1, z_loss=0.01)
    sums, told, found = losses_and_gradient(logits.detach().float().clone(), labels, label_smoothing=0.1, z_loss=0.01, answers=labels)
    assert told is not None
    torch.testing.assert_close(told[[0, 2]], torch.stack([plain.nll, (labels != IGNORED).sum().float()]))
    torch.testing.assert_close([sums.total, sums.nll], [plain.total.detach(), plain.nll])
    torch.testing.assert_close(
        found.to(dtype), *torch.autograd.grad(plain.total, logits), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )
    assert not found[labels == IGNORED].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("options", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.1, 0.01)])
def test_what_a_gpu_compiles_gives_the_sums_and_the_gradient_of_the_reference(
    options: tuple[float, float], answered: bool, dtype: torch.dtype
) -> None:
    logits, labels = torch.randn(50, 97, dtype=dtype).mul(3), ragged_labels(5, 10, 97).flatten()
    answers = labels.masked_fill(torch.arange(50) % 3 == 0, IGNORED) if answered else None
    logits[labels == IGNORED, 0] = 9.0  # the likeliest token where there is no answer is no right one
    wide = logits.to(torch.promote_types(dtype, torch.float32), copy=True)
    expected, told, gradient = losses_and_gradient(wide, labels, *options, answers=answers)
    sums = entropy_(logits, labels, answers, *options)
    torch.testing.assert_close(sums[:2], torch.stack([expected.total, expected.nll]).float())
    torch.testing.assert_close(sums[2:], torch.zeros(3) if told is None else told.float())
    torch.testing.assert_close(logits, gradient.to(dtype), atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_chunked_loss_by_what_a_gpu_compiles_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(HeadConfig(bias=True, softcap=3.0), RMSNormConfig(), 16, 97)
    hidden, labels, found, calls = torch.randn(50, 16, requires_grad=True), ragged_labels(5, 10, 97).flatten(), [], []
    for function in (None, lambda *given: (calls.append(1), entropy_(*given))[1]):
        monkeypatch.setattr("lm.losses.tokens.entropy_here", lambda device, function=function: function)
        sums = chunked_loss(hidden, labels, head, label_smoothing=0.1, z_loss=0.01, chunk=20, answers=labels)
        told = [sums.total, sums.nll, sums.metrics["label_loss"], sums.metrics["accuracy"]]
        found.append([*told, *torch.autograd.grad(sums.total, (hidden, head.weight, head.bias))])
    torch.testing.assert_close(*found)
    assert len(calls) == 2  # of rows with labels


@pytest.mark.slow
def test_it_compiles_to_the_same_with_any_number_of_rows() -> None:
    compiled = torch.compile(entropy_)
    for rows in (50, 30, 7):
        given = torch.randn(rows, 97).mul(3).bfloat16(), ragged_labels(2, rows, 97)[1]
        results = [(function(logits := given[0].clone(), given[1], given[1], 0.1, 0.01), logits) for function in (entropy_, compiled)]
        torch.testing.assert_close(*results, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 7), (5, 33), (300, 8192), (3, 70001)])
def test_log_probabilities_that_are_written_over_logits_have_torchs_bits(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    logits = torch.randn(shape, dtype=dtype).mul(5)
    before = logits.clone()
    assert torch.equal(Vocabulary().log_softmax_(logits), F.log_softmax(before, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_rows_in_float32_at_a_time_give_the_gradients_of_all_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(HeadConfig(bias=True, softcap=3.0), RMSNormConfig(), 16, 97).to(dtype)
    hidden, labels = torch.randn(50, 16).to(dtype).requires_grad_(), ragged_labels(5, 10, 97).flatten()
    results = []
    for rows in (50, 7, 0):  # 0: never fewer than one row
        monkeypatch.setattr("lm.losses.tokens.WIDE_CPU", 97 * rows)
        sums = chunked_loss(hidden, labels, head, label_smoothing=0.1, z_loss=0.01, answers=labels)
        results.append((torch.stack([sums.total, sums.nll, *sums.metrics["label_loss"], *sums.metrics["accuracy"]]).detach(),
                        torch.autograd.grad(sums.total, (hidden, head.weight, head.bias))))  # fmt: skip
    (whole, gradients), *others = results
    for told, found in others:
        torch.testing.assert_close(told, whole)
        torch.testing.assert_close(found, gradients)


@pytest.mark.parametrize("trained", ["weight", "bias", "dense.weight", "narrow.weight"])
@pytest.mark.parametrize("chunk", [7, 50])
def test_a_chunked_loss_under_autocast_has_the_gradients_of_a_plain_one(trained: str, chunk: int) -> None:
    """Of frozen heads too. The matrix is cast once; the sums over chunks are of float32, so a plain bf16 gradient may be a rounding off."""
    transform, narrowed = ("gelu", None) if trained != "narrow.weight" else (None, 9)
    head = Head(HeadConfig(bias=True, softcap=3.0, transform=transform), RMSNormConfig(), 16, 97, narrowed)
    hidden, labels = torch.randn(50, 16, requires_grad=True), ragged_labels(5, 10, 97).flatten()
    for name, p in head.named_parameters():
        p.requires_grad_(name == trained)
    wanted = (hidden, head.get_parameter(trained))
    with torch.autocast("cpu", torch.bfloat16):
        chunked = chunked_loss(hidden, labels, head, z_loss=0.01, chunk=chunk)
        plain = token_losses(head(hidden), labels, z_loss=0.01)
    near(chunked.total, plain.total)
    for found, right in zip(torch.autograd.grad(chunked.total, wanted), torch.autograd.grad(plain.total, wanted), strict=True):
        assert found.dtype == right.dtype == torch.float32
        torch.testing.assert_close(found, right, rtol=0, atol=2**-7 * float(right.abs().max()))


def test_a_parameter_of_a_norm_that_is_a_single_number_has_its_gradient_summed_over_chunks() -> None:
    """As alpha of a plugin's DyT, in bf16."""
    head = Head(HeadConfig(transform="gelu"), RMSNormConfig(), 16, 97).bfloat16()
    head.norm = Times()
    hidden, labels = torch.randn(50, 16).bfloat16(), ragged_labels(5, 10, 97).flatten()
    found, right = (torch.autograd.grad(chunked_loss(hidden, labels, head, chunk=chunk).total, head.norm.factor)[0] for chunk in (7, 50))
    assert found.ndim == 0
    torch.testing.assert_close(found, right, rtol=2**-5, atol=0)


def test_evaluation_needs_no_gradient_and_gives_the_same_sums() -> None:
    head, hidden, labels = Head(HeadConfig(), RMSNormConfig(), 16, 97), torch.randn(50, 16), ragged_labels(5, 10, 97).flatten()
    with torch.no_grad():
        evaluated = chunked_loss(hidden, labels, head, chunk=7)
    torch.testing.assert_close(evaluated.total, chunked_loss(hidden, labels, head, chunk=7).total.detach())


def test_sums_are_float32_where_everything_else_is_bf16() -> None:
    head, hidden = Head(HeadConfig(), RMSNormConfig(), 16, 97).bfloat16(), torch.randn(2000, 16).bfloat16().requires_grad_()
    labels = torch.randint(0, 97, (2000,))
    expected = F.cross_entropy(head(hidden).float(), labels, reduction="sum")
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)  # as Lightning does for bf16-true
        sums = chunked_loss(hidden, labels, head, chunk=7)
    finally:
        torch.set_default_dtype(default)
    assert sums.total.dtype == sums.nll.dtype == torch.float32
    near(sums.nll, expected.detach())


def test_rows_and_micro_batches_weigh_by_their_label_tokens() -> None:
    model = build_model(from_tree(DecoderConfig, TINY), seed=0)
    tokens, labels = torch.randint(0, 97, (32, 16)), ragged_labels(32, 16, 97)
    n = int((labels != IGNORED).sum())

    def gradient(rows: int) -> list[torch.Tensor]:
        model.zero_grad()
        for i in range(0, 32, rows):
            sums = model(Batch(tokens[i : i + rows]), read=causal_reader(labels[i : i + rows], chunk=100))
            (sums.total / n).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for one, split in zip(gradient(32), gradient(4), strict=True):
        near(one, split)


def peak_bytes(run: Callable[[], None]) -> int:
    """What a function allocates at most at a time, by the allocator's own events."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    sizes, live, peak = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"], 0, 0
    for event in sorted(sizes, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.slow
def test_peak_memory_is_that_of_a_chunk_of_logits() -> None:
    """Not of the whole batch's, and in bf16 few of them in float32 beside."""
    head, hidden = Head(HeadConfig(), RMSNormConfig(), 8, 5000), torch.randn(4096, 8, requires_grad=True)
    labels = torch.randint(0, 5000, (4096,))

    def largest(chunk: int, bf16: bool = False) -> int:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return peak_bytes(lambda: chunked_loss(hidden, labels, head, chunk=chunk).total.backward())

    whole_logits = 4096 * 5000 * 4
    assert largest(4096) > whole_logits
    assert largest(1024) < 1.2 * whole_logits / 4  # the logits, and their gradient where they were, as the estimate of memory has it
    assert largest(128) < whole_logits / 16
    vectors, matrix = hidden.detach().bfloat16(), head.weight.detach().bfloat16()
    imitated = peak_bytes(lambda: torch.mm(vectors, matrix.T)) - whole_logits / 2  # in float32 first, by a CPU that has no products in bf16
    assert 0 <= imitated < 1.1 * whole_logits
    assert largest(4096, bf16=True) < 1.2 * (whole_logits / 2 + 4 * WIDE_CPU) + imitated


def test_z_loss_and_smoothing_count_label_tokens_only_and_by_their_formulas() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 9), torch.tensor([3, IGNORED, 0, 8, IGNORED, 1])
    kept = labels != IGNORED
    log_p, log_z = F.log_softmax(logits, -1)[kept], logits.logsumexp(-1)[kept]
    nll = -log_p[torch.arange(4), labels[kept]].sum()
    sums = token_losses(logits, labels, label_smoothing=0.2, z_loss=0.1)
    torch.testing.assert_close(sums.nll, nll)
    torch.testing.assert_close(sums.total, 0.8 * nll - 0.2 * log_p.mean(-1).sum() + 0.1 * log_z.square().sum())
