"""What Lightning needs of torchmetrics: no more is imported, and all of it is there for whoever asks."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from lm.training import lean

needed = dict(lean._NEEDED)
lean._NEEDED["NoSuchMetric"] = "metric"
lean.leave_out_metrics()
lean._NEEDED = needed
print([name for name in sys.modules if name.startswith("torchmetrics")])

lean.leave_out_metrics()
from lightning.pytorch.core.module import Metric

print([name for name in ("scipy.signal", "transformers", "torchmetrics.functional") if name in sys.modules])

import torch
from torchmetrics.classification import BinaryAccuracy
import torchmetrics
print(isinstance(BinaryAccuracy(), Metric), BinaryAccuracy()(torch.tensor([1, 0]), torch.tensor([1, 1])).item())
print(torchmetrics.AUROC.__name__)
"""


@pytest.mark.slow
def test_lightning_comes_without_the_metrics_and_these_come_when_they_are_asked_for() -> None:
    """Another torchmetrics than this one, in which a name is missing, is imported as ever."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "[]", "True 0.5", "AUROC"], done.stderr
