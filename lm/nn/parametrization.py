"""How initial weights, multipliers and learning rates go with width and depth, so that what was tuned at a base size holds at others.

muP (Yang et al. 2022, arXiv:2203.03466, in the form of table 8): a step changes activations as much at any width. CompleteP (Dey et al.
2025, arXiv:2505.01618, table 1 with alpha = 1): and at any depth.
"""

from abc import abstractmethod
from typing import Literal, NamedTuple

from pydantic import Field

from lm.schema import MOST, MOST_LAYERS, Slot

Role = Literal["vector", "hidden", "scores"]
"""What a weight does with the width: hidden matrices read and write it, scores read it into a few numbers (a router), and all others do not
read it (embeddings, norms, biases, kernels) or have a multiplier for it (the head)."""


class Growth(NamedTuple):
    """The size of a model as multiples of its base: m in width, l in depth, and the width of a head."""

    width: float = 1.0
    depth: float = 1.0
    head: float = 1.0


class ParametrizationConfig(Slot, group="model/parametrization"):
    """How initial weights, multipliers and rates go with the size of a model."""

    @abstractmethod
    def growth(self, d_model: int, n_layers: int, head_dim: int) -> Growth:
        """Returns the size of such a model as multiples of its base.  head_dim: how many products a score of attention sums."""


class StandardConfig(ParametrizationConfig):
    """Every size for itself: a rate that is best at one width is not at another."""

    kind: Literal["standard"] = "standard"

    def growth(self, d_model: int, n_layers: int, head_dim: int) -> Growth:
        return Growth()


class WidthConfig(ParametrizationConfig):
    """What the kinds with a base width share. All widths grow together: heads, feed-forwards and latents as d_model."""

    base_width: int = Field(gt=0, le=MOST)
    """The d_model at which this is the standard parametrization, to the bit: that of the model whose rates were tuned."""
    base_head_dim: int | None = Field(None, gt=0, le=MOST)
    """Width of a head there, where heads grow too: scores are divided by it, not by its root. null: heads are as wide here, and more."""

    def growth(self, d_model: int, n_layers: int, head_dim: int) -> Growth:
        return Growth(d_model / self.base_width, 1.0, head_dim / (self.base_head_dim or head_dim))


class MuPConfig(WidthConfig):
    """The best rate of the base width is that of every width (Yang et al. 2022, arXiv:2203.03466)."""

    kind: Literal["mup"] = "mup"


class CompletePConfig(WidthConfig):
    """And of every depth (Dey et al. 2025, arXiv:2505.01618)."""

    kind: Literal["completep"] = "completep"
    base_depth: int = Field(gt=0, le=MOST_LAYERS)
    """The layers that a token goes through where this is muP: n_layers of the model whose rates were tuned, times its passes."""

    def growth(self, d_model: int, n_layers: int, head_dim: int) -> Growth:
        return super().growth(d_model, n_layers, head_dim)._replace(depth=n_layers / self.base_depth)
