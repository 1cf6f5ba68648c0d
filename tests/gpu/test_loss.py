"""The loss that is compiled for the GPU equals the reference, gradients included."""

import pytest
import torch

from lm.losses.cross_entropy import losses_and_gradient, token_losses
from lm.losses.likelihoods import label_likelihoods
from lm.losses.teacher import SoftTargets
from lm.losses.tokens import chunked_loss
from lm.nn.batch import IGNORED, Batch
from lm.nn.context import Context
from lm.nn.head import Head, HeadConfig
from lm.nn.norm import RMSNormConfig
from lm.ops.entropy import entropy_here

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [(0.0, 0.0), (0.1, 0.01)])
def test_the_compiled_function_equals_the_reference(options: tuple[float, float], dtype: torch.dtype) -> None:
    compiled = entropy_here(GPU)
    assert compiled is not None
    for rows, answered in ((300, False), (300, True), (100, True), (7, True)):
        logits, labels = torch.randn(rows, 5003, device=GPU, dtype=dtype).mul(3), torch.randint(0, 5003, (rows,), device=GPU)
        labels[::5] = IGNORED
        answers = labels.masked_fill(torch.arange(rows, device=GPU) % 3 == 0, IGNORED) if answered else None
        expected, told, gradient = losses_and_gradient(logits.float().clone(), labels, *options, answers=answers)
        sums = compiled(logits, labels, answers, *options)
        torch.testing.assert_close(sums[:2], torch.stack([expected.total, expected.nll]), rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(sums[2:], torch.zeros(3, device=GPU) if told is None else told, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(logits.float(), gradient, atol=1e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4)


def test_a_loss_that_leaves_places_without_a_label_out_equals_the_plain_one() -> None:
    """Their number is known from the batch on the CPU."""
    labels = torch.where(torch.rand(5, 100) < 0.2, torch.randint(0, 5003, (5, 100)), IGNORED)
    batch, head = Batch(labels, labels).to(GPU), Head(HeadConfig(), RMSNormConfig(), 64, 5003).to(GPU)
    assert batch.labels is not None and batch.n_labels(batch.labels) == int((labels != IGNORED).sum())
    hidden = torch.randn(5, 100, 64, device=GPU, requires_grad=True)
    sums = chunked_loss(hidden, batch.labels, head, chunk=64, n_labels=batch.n_labels(batch.labels))
    plain = token_losses(head(hidden).flatten(0, 1), batch.labels.flatten())
    found, expected = (torch.autograd.grad(each.total, (hidden, head.weight)) for each in (sums, plain))
    torch.testing.assert_close([sums.total, *found], [plain.total, *expected], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("chunk", [64, 1024])
def test_likelihoods_in_chunks_equal_cross_entropy(chunk: int) -> None:
    head = Head(HeadConfig(bias=True), RMSNormConfig(), 64, 5003).to(GPU)
    hidden, labels = torch.randn(5, 100, 64, device=GPU, requires_grad=True), torch.randint(0, 5003, (5, 100), device=GPU)
    labels[:, ::3] = IGNORED
    weights = torch.randn(int((labels != IGNORED).sum()), device=GPU)
    here = Context.alone(hidden)
    results = (
        label_likelihoods(labels, chunk)(hidden, head, here),
        -token_nats(head(hidden[labels != IGNORED]), labels[labels != IGNORED]),
    )
    found, expected = ([each, *torch.autograd.grad((each * weights).sum(), (hidden, head.weight))] for each in results)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def token_nats(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def test_a_chunked_loss_equals_the_plain_one() -> None:
    head = Head(HeadConfig(bias=True), RMSNormConfig(), 64, 5003).to(GPU)
    hidden, labels = torch.randn(500, 64, device=GPU, requires_grad=True), torch.randint(0, 5003, (500,), device=GPU)
    sums, plain = chunked_loss(hidden, labels, head, chunk=128), token_losses(head(hidden), labels)
    found, expected = (torch.autograd.grad(each.total, (hidden, head.weight, head.bias)) for each in (sums, plain))
    torch.testing.assert_close([sums.total, sums.nll, *found], [plain.total, plain.nll, *expected], atol=1e-3, rtol=1e-4)


def test_a_chunked_loss_beside_a_teacher_equals_the_plain_one() -> None:
    head, teacher = (Head(HeadConfig(), RMSNormConfig(), d, 5003).to(GPU) for d in (64, 96))
    hidden, theirs = torch.randn(500, 64, device=GPU, requires_grad=True), torch.randn(500, 96, device=GPU)
    labels = torch.randint(0, 5003, (500,), device=GPU).masked_fill(torch.rand(500, device=GPU) < 0.2, IGNORED)
    sums = chunked_loss(hidden, labels, head, chunk=128, teacher=SoftTargets(theirs, teacher, 0.4))
    plain = token_losses(head(hidden), labels, soft=teacher(theirs).softmax(-1).detach(), weight=0.4)
    found, expected = (torch.autograd.grad(each.total, (hidden, head.weight)) for each in (sums, plain))
    torch.testing.assert_close([sums.total, sums.nll, *found], [plain.total, plain.nll, *expected], atol=1e-3, rtol=1e-4)
