"""Objectives: what is made of the last hidden states (lm/nn/loss.py does the sums)."""

from torch import Tensor

from lm.data.objective import ObjectiveBase
from lm.nn.head import Reader


def causal_reader(labels: Tensor, cfg: ObjectiveBase) -> Reader:
    """What to pass as `loss` to a model's forward: LossSums over the label tokens of this batch.  labels: (b, s)."""
    from lm.nn import loss  # brings torch's compiler, a second that a mere composition need not wait

    return loss.causal_reader(labels, cfg.label_smoothing, cfg.z_loss, cfg.chunk)
