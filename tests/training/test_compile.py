"""`trainer.compile=true`: the backbone is one graph, compiled once, and trains as the eager model does."""

from typing import ClassVar

import pytest
import torch
from torch._dynamo.utils import counters

from lm.nn.batch import Batch
from lm.training.module import TrainModule
from tests.training.steps import ADAMW, STEPS, batches, config, train_steps


class Counting(TrainModule):
    """Graphs known at the start of every micro-batch."""

    graphs: ClassVar[list[int]]

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.graphs.append(counters["stats"]["unique_graphs"])
        return super().training_step(batch, batch_idx)


@pytest.mark.slow  # a compiler runs
@pytest.mark.parametrize("documents", [False, True])
def test_a_compiled_model_trains_as_the_eager_one(documents: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    Counting.graphs = []
    cfg = config(ADAMW)
    expected, eager = train_steps(cfg, batches(documents=documents))
    found, compiled = train_steps(cfg, batches(documents=documents), kind=Counting, compile=True)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-4)  # AdamW's first steps amplify rounding
    assert Counting.graphs == [0] + [2] * (2 * STEPS - 1)  # the backbone, and the flattening of its output for the loss, both at once
