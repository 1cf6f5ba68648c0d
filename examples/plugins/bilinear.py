"""A feed-forward: a gated layer without an activation, which its weights alone explain.

Shazeer 2020, arXiv:2002.05202, section 2; Pearce et al. 2024, arXiv:2410.08417.

    lm train plugins=examples/plugins/bilinear.py model/ffn=swiglu,bilinear -m
"""

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from lm.kinds import Activations, Context, FFNConfig, Linear, Out


class BilinearConfig(FFNConfig):
    """down(gate(x) * up(x))."""

    kind: Literal["bilinear"] = "bilinear"
    hidden: int | None = Field(None, gt=0)
    """Inner width. null: 8/3 d_model, so that there are as many weights as in a layer of two matrices and 4 d_model."""

    def width(self, d_model: int) -> int:
        """Returns the inner width."""
        return self.hidden or -(-8 * d_model // 3)

    def build(self, d_model: int, layer: int) -> nn.Module:
        return Bilinear(d_model, self.width(d_model))

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Gate, up and their product."""
        return Activations(0, 3 * self.width(d_model), casts=d_model)


class Bilinear(nn.Module):
    """The same for every token, whatever the context."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(d_model, hidden, bias=False)
        self.up = Linear(d_model, hidden, bias=False)
        self.down = Out(hidden, d_model, bias=False)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.down(self.gate(x) * self.up(x))
