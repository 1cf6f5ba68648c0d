"""Run by itself: Triton's interpreter over the kernels of flash-linear-attention, on a CPU, against our own form.

The interpreter hands Python's numbers to a kernel's loops, of which these ask for a tensor's methods, and the tuner wants a device's clock:
both are mended here, from outside.
"""

import itertools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from triton.runtime import autotuner, interpreter

from lm.nn.batch import Batch
from lm.nn.transformer import LM
from lm.ops.recurrence import kernels
from lm.ops.recurrence.matrix import Flow, reference
from lm.schema import Tree
from tests.nn.models import DELTA, GLA, MAMBA2, config, redrawn

B, H, S, K, V = 2, 2, 80, 16, 32
CUTS = [0, 30, 80, 100, 101, 160]  # documents of both rows, one behind the other


def numbers(*given: Any) -> Iterator[Any]:
    """As `range` in a compiled kernel."""
    yield from map(interpreter._implicit_cvt, range(*map(int, given)))


def mend() -> None:
    run = interpreter.GridExecutor.__call__

    def call(self: Any, *given: Any, **named: Any) -> Any:
        self.fn.__globals__["range"] = numbers
        try:
            return run(self, *given, **named)
        finally:
            del self.fn.__globals__["range"]

    interpreter.GridExecutor.__call__ = call
    autotuner.Autotuner._bench = lambda self, *given, **named: [0.0, 0.0, 0.0]


def apart(found: Tensor, wanted: Tensor) -> float:
    """Of the largest number."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def kernel_by_kernel(channels: int, delta: bool, several: bool) -> float:
    """Returns how far values, gradients or states are apart at most."""
    source = torch.Generator().manual_seed(0)
    q, k, v, decay, beta = (
        torch.rand(B, S, H, n, generator=source) - shift for n, shift in ((K, 0.5), (K, 0.5), (V, 0.5), (channels, 1), (1, 0))
    )
    given = [x.requires_grad_() for x in (q, k, v, decay, beta)[: 5 if delta else 4]]
    flow = Flow(*(x.transpose(1, 2) for x in given))
    documents = torch.zeros(B * S, dtype=torch.long)
    documents[CUTS[1:-1]] = 1
    documents = documents.cumsum(0).view(B, S)
    if several:
        ends = kernels.bounds(documents)
        assert ends.tolist() == CUTS
        (found, last), (wanted, states) = kernels.fused(flow, torch.float32, ends=ends), reference(flow, flow.empty(), documents)
        pairs = [(found, wanted), (last[-1], states[-1][-1])]
    else:
        state = torch.randn(B, H, K, V, generator=source)
        (found, last), (wanted, states) = kernels.fused(flow, torch.float32, state), reference(flow, state)
        pairs = [(found, wanted), (last, states[-1])]
    weight = torch.randn(wanted.shape, generator=source)
    grads = ([*torch.autograd.grad((out * weight).sum(), given)] for out in (found, wanted))
    return max(apart(a, b) for a, b in [*pairs, *zip(*grads, strict=True)])


def through(model: LM, batch: Batch) -> list[Tensor]:
    """Returns logits of packed rows, their gradients, and logits of plain rows by a cache, a prompt first."""
    logits = model(batch)
    grads = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
    with torch.no_grad():
        cache = model.new_cache(len(batch.tokens), 64, slack=2)
        parts = [model(batch.tokens[:, at:to], cache=cache) for at, to in ((0, 20), (20, 21), (21, 30))]
    return [logits, *grads, *parts]


def model_by_model(recurrent: Tree) -> float:
    """Returns how far logits or gradients of a hybrid are apart at most, with the kernels and without."""
    model = redrawn(config(recurrent=recurrent, n_layers=2, pattern=["recurrent", "attention"], max_seq_len=64))
    documents = torch.tensor([[0] * 30 + [1] * 18, [0] * 48], dtype=torch.int32)
    positions = torch.tensor([[*range(30), *range(18)], [*range(48)]])
    batch = Batch(torch.randint(0, 16, (2, 48)), positions=positions, documents=documents)
    asked = []

    def served(flow: Flow, dtype: torch.dtype) -> bool:
        asked.append(flow.q.shape[2])
        return True

    wanted = through(model, batch)
    with mock.patch.object(kernels, "serves", served):
        found = through(model, batch)
    assert asked == [48, 17, 6], asked  # packed rows, prompt and last tokens, without those whose states are kept
    return max(apart(a, b) for a, b in zip(found, wanted, strict=True))


def main() -> None:
    mend()
    for channels, delta, several in itertools.product((1, K), (False, True), (False, True)):
        error = kernel_by_kernel(channels, delta, several)
        print(f"channels={channels} delta={delta} documents={several}: {error:.1e}", flush=True)
        assert error < 1e-5
    for recurrent in (GLA, GLA | {"decay": "constant"}, DELTA | {"negative": True}, DELTA | {"channels": True}, MAMBA2):
        error = model_by_model(recurrent)
        print(f"{recurrent}: {error:.1e}", flush=True)
        assert error < 1e-4


if __name__ == "__main__":
    main()
