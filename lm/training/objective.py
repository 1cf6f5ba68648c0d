"""Objectives: what is made of the last hidden states (lm/nn/loss.py does the sums)."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from lm.config import Config
from lm.nn.head import Reader


class CausalConfig(Config):
    """Predict the next token."""

    kind: Literal["causal"] = "causal"
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Part of the target mass spread evenly over the vocabulary (Szegedy et al. 2015, arXiv:1512.00567)."""
    z_loss: float = Field(0.0, ge=0)
    """Factor on the mean of log(Z)^2, which keeps logits small (Chowdhery et al. 2022, arXiv:2204.02311, section 5)."""
    chunk: int = Field(1024, gt=0)
    """Tokens whose logits exist at once."""


ObjectiveConfig = CausalConfig


def causal_reader(labels: Tensor, cfg: CausalConfig) -> Reader:
    """What to pass as `loss` to a model's forward: LossSums over the label tokens of this batch.  labels: (b, s)."""
    from lm.nn import loss  # brings torch's compiler, a second that a mere composition need not wait

    return loss.causal_reader(labels, cfg.label_smoothing, cfg.z_loss, cfg.chunk)
