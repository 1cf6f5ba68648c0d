"""Next-token losses as sums over label tokens. Logits exist only chunk by chunk."""

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lm.losses.auxiliary import Auxiliary
from lm.losses.cross_entropy import ALL, LossSums, answered, losses_and_gradient, token_losses
from lm.losses.teacher import SoftTargets
from lm.nn.batch import IGNORED
from lm.nn.context import Context
from lm.nn.head import CHUNK, WIDE, WIDE_CPU, Head, Reader
from lm.nn.mtp import shifted
from lm.ops.attention.mask import Mask
from lm.ops.entropy import entropy_here
from lm.ops.linear import recurring
from lm.ops.once_differentiable import once_differentiable

Rows = slice | Tensor
_ROWS = 512  # rows of a matrix that are added at a time


class _Chunked(torch.autograd.Function):
    """Sum of token_losses over chunks, of the rows of `spans`. Each chunk's gradient is computed at once, so that its logits can be freed:
    the same work as the plain loss, and memory for one chunk. `parameters` are the head's, passed so that autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        answers: Tensor | None,
        shares: Tensor | None,
        head: Head,
        extras: tuple[float, float],
        spans: Sequence[Rows],
        teacher: SoftTargets | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = torch.zeros(_n_sums(teacher), device=hidden.device, dtype=torch.float32)
        d_hidden, each = torch.zeros_like(hidden), _Chunk(head, extras, parameters, teacher)
        d_parameters: list[Tensor] = []  # in float32, whatever the weights are
        for rows in spans:
            some_answers, some_shares = (None if x is None else x[rows] for x in (answers, shares))
            found, d_hidden[rows], grads = each(rows, hidden[rows], labels[rows], some_answers, some_shares)
            if not d_parameters:
                d_parameters = [g.float() for g in grads]
            else:
                for mine, g in zip(d_parameters, grads, strict=True):
                    _add(mine, g)
            sums += found
        ctx.save_for_backward(d_hidden, *(mine.to(p.dtype) for mine, p in zip(d_parameters, parameters, strict=True)))
        total, nll, extra = sums[0].clone(), sums[1], sums[2:]  # FSDP2 warns of a view that it puts its hook on
        ctx.mark_non_differentiable(nll, extra)
        return total, nll, extra

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, *d_parameters = ctx.saved_tensors
        return d_hidden * grads[0], None, None, None, None, None, None, None, *(d.mul_(grads[0]) for d in d_parameters)


def _add(total: Tensor, part: Tensor) -> None:
    """total += part. A part of narrower dtype is added a few rows at a time, since torch makes a wide copy of it on a CPU."""
    if not total.is_cpu or part.dtype == total.dtype or not part.ndim:
        total.add_(part)
        return
    for some, more in zip(total.split(_ROWS), part.split(_ROWS), strict=True):
        some.add_(more)


class _Chunk:
    """Computes of a chunk the sums, (5,) or (7,), which are `total`, `nll`, the three of `answered` and the two of a teacher, and the
    gradients of hidden states and head parameters. The head's matrix is cast once for all chunks: autograd would cast its gradient back
    for each."""

    def __init__(self, head: Head, extras: tuple[float, float], parameters: Sequence[Tensor], teacher: SoftTargets | None) -> None:
        self.head, self.extras, self.weight, self.teacher = head, extras, head.cast(), teacher
        self.leaves = [self.weight if p is head.weight else p for p in parameters]
        self.wide: Tensor | None = None

    def __call__(
        self, rows: Rows, hidden: Tensor, labels: Tensor, answers: Tensor | None, shares: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        gathered = self.head.vocabulary.all_gather
        with torch.enable_grad():
            piece = hidden.detach().requires_grad_()
            logits = self.head.part(piece, self.weight)
        d_logits = logits.detach()
        soft = None if self.teacher is None else self.teacher.probabilities(rows, d_logits.shape[-1])
        beside = [None if x is None else gathered(x) for x in (answers, shares)]
        sums = self.written_over(d_logits, gathered(labels), beside[0], soft, beside[1])
        d_piece, *grads = torch.autograd.grad(logits, (piece, *self.leaves), d_logits)
        return sums, d_piece, tuple(grads)

    def written_over(self, logits: Tensor, labels: Tensor, answers: Tensor | None, soft: Tensor | None, shares: Tensor | None) -> Tensor:
        """Returns the sums, and writes the gradient over the logits: by one compiled function on a GPU, elsewhere, and beside a teacher or
        shares, so few rows at a time that their float32 copy stays in a cache."""
        vocabulary, sums = self.head.vocabulary, logits.new_zeros(_n_sums(self.teacher), dtype=torch.float32)
        if vocabulary.ranks == 1 and soft is None and shares is None and (compiled := entropy_here(logits.device)) is not None:
            return compiled(logits, labels, answers, *self.extras)
        how = (0.0, 1.0, 0.0) if self.teacher is None else (self.teacher.weight, self.teacher.temperature, self.teacher.beta)
        rows = at_a_time(logits) if vocabulary.ranks == 1 else len(logits)  # so that every rank exchanges as often as the others
        if self.wide is None and logits.dtype.itemsize < torch.float32.itemsize:  # once: new memory takes longer than what is done with it
            self.wide = torch.empty_like(logits[:rows], dtype=torch.float32)
        for start in range(0, len(logits), rows):
            some, at = logits[start : start + rows], slice(start, start + rows)
            wide = some if self.wide is None else self.wide[: len(some)].copy_(some)
            some_answers, some_soft, some_shares = (None if x is None else x[at] for x in (answers, soft, shares))
            beside = (*self.extras, vocabulary, some_answers, some_soft, *how, some_shares)
            found, answer_sums, gradient = losses_and_gradient(wide, labels[at], *beside)
            if gradient is not some:
                some.copy_(gradient)
            sums[0] += found.total
            sums[1] += found.nll
            if answer_sums is not None:
                sums[2:5] += answer_sums
            if soft is not None:
                sums[5:] += found.metrics["teacher_kl"]
        return sums


def _n_sums(teacher: SoftTargets | None) -> int:
    return 5 if teacher is None else 7


def at_a_time(logits: Tensor) -> int:
    """Returns how many rows of the logits are converted to float32 together."""
    return max(1, (WIDE_CPU if logits.is_cpu else WIDE) // logits.shape[1])


def chunked_loss(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int = CHUNK,
    answers: Tensor | None = None,
    n_labels: int | None = None,
    teacher: SoftTargets | None = None,
    shares: Tensor | None = None,
) -> LossSums:
    """token_losses(head(hidden), labels) without ever holding more than `chunk` rows of logits, nor most of those of IGNORED labels.

    hidden: (..., d), labels: (...).  answers: (...) those of the labels for which `label_loss` and `accuracy` are reported. None: these
    are not.  n_labels: no more labels than this are not IGNORED; labels on a CPU are counted.  teacher: its soft targets for these tokens,
    part of the loss where there is a gradient.  shares: (...) what each label counts in all sums but those of answers; None: 1.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()  # (b, s, d) -> (b*s, d)
    answers, shares = (None if x is None else x.flatten() for x in (answers, shares))
    if shares is not None:
        labels = labels.masked_fill(shares == 0, IGNORED)
    extras, ranks = (label_smoothing, z_loss), head.vocabulary.ranks
    if torch.is_grad_enabled():
        trainable, spans = [p for p in head.parameters() if p.requires_grad], _spans(labels, max(chunk // ranks, 1), n_labels, ranks)
        total, nll, extra = _Chunked.apply(hidden, labels, answers, shares, head, extras, spans, teacher, *trainable)
    else:
        each = [_piece(head(hidden[rows]), rows, labels, answers, shares, extras) for rows in _spans(labels, chunk, n_labels, ranks)]
        total, nll, extra = (torch.stack(sums).sum(0) for sums in zip(*each, strict=True))
    beside = {} if len(extra) == 3 else {"teacher_kl": extra[3:]}
    return LossSums(total, nll, metrics=beside if answers is None else beside | {"label_loss": extra[[0, 2]], "accuracy": extra[1:3]})


def _spans(labels: Tensor, chunk: int, n_labels: int | None, ranks: int) -> Sequence[Rows]:
    """Returns chunks of rows that include all labels: of all rows, or, where they are fewer, of some with the labelled ones first. Ranks
    that share a vocabulary take all, since they exchange each other's.

    On a CPU their number recurs; elsewhere chunks are full, since another number of rows would be compiled for. What is compiled first
    determines how all is rounded, and a resumed run begins with other rows.
    """
    n = size = len(labels)
    if labels.is_cpu:
        size = recurring(max(int((labels != IGNORED).sum()), 1))
    elif n_labels is not None:
        size = max(-(-n_labels // chunk), 1) * chunk
    if ranks == 1 and size < n:
        return labelled_first(labels)[:size].split(chunk)
    return [slice(start, start + chunk) for start in range(0, n, chunk)]


def labelled_first(labels: Tensor) -> Tensor:
    """Returns the indices of all rows, those with a label first, in their order.  labels: (rows,)."""
    return (labels == IGNORED).byte().argsort(stable=True)


def _piece(
    logits: Tensor, rows: Rows, labels: Tensor, answers: Tensor | None, shares: Tensor | None, extras: tuple[float, float]
) -> tuple[Tensor, ...]:
    sums = token_losses(logits, labels[rows], *extras, shares=None if shares is None else shares[rows])
    return sums.total, sums.nll, logits.new_zeros(3) if answers is None else answered(ALL.log_softmax_(logits.float()), answers[rows])


@cache
def _outside_of_graphs() -> Callable[..., LossSums]:
    """Returns chunked_loss for a compiled model, whose graphs leave it out."""
    return torch.compiler.disable(chunked_loss)


def causal_reader(
    labels: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int = CHUNK,
    answers: Tensor | None = None,
    n_labels: int | None = None,
    teacher: SoftTargets | None = None,
    shares: Tensor | None = None,
) -> Reader:
    """Returns what to pass as `read` to a model's forward: LossSums over the label tokens of this batch.  labels, answers, shares: (b, s);
    the rest as in chunked_loss."""

    # where the compiler is not even loaded no model is compiled, and loading it takes longer than most evaluations
    computed = _outside_of_graphs() if "torch._dynamo" in sys.modules else chunked_loss
    summed = partial(computed, label_smoothing=label_smoothing, z_loss=z_loss, chunk=chunk, n_labels=n_labels)

    def read(hidden: Tensor, head: Head, ctx: Context) -> LossSums:
        sums = summed(hidden, labels, head, answers=answers, teacher=teacher, shares=shares)
        total = sums.total
        for n, further in enumerate(ctx.mtp, 1):
            later = summed(further, _later_labels(labels, n, ctx.mask), head)
            total = total + later.total * (ctx.mtp_weight / len(ctx.mtp))
        found = LossSums(total, sums.nll, metrics=sums.metrics)
        counted = labels != IGNORED if shares is None else shares
        return Auxiliary.of(ctx.reported, counted.sum(-1)).beside(found)

    return read


def _later_labels(labels: Tensor, n: int, mask: Mask) -> Tensor:
    """Returns the labels n places later; IGNORED where they are of another document, and within a prefix, where a token sees later keys,
    which the later tokens' embeddings have been joined with."""
    later, documents, prefix = shifted(labels, n, IGNORED), mask.q_documents, mask.k_prefix
    if prefix is not None:
        later = later.masked_fill(prefix & shifted(prefix, 1, False), IGNORED)
    return later if documents is None else later.masked_fill(shifted(documents, n, -1) != documents, IGNORED)
