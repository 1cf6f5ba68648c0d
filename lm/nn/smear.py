"""A mix with the token before, between embedding and blocks."""

import torch
from pydantic import Field
from torch import Tensor, nn

from lm.nn.activation_memory import Activations
from lm.nn.context import Context
from lm.nn.init import Declares, zeros
from lm.ops.cache.cache import Fixed
from lm.ops.recurrence.convolve import previous
from lm.schema import MOST, Config


class SmearConfig(Config):
    """Each embedded token has a share of the one before it in its document added, by a gate of its own (modded-nanogpt, nanochat)."""

    channels: int = Field(24, gt=0, le=MOST)
    """The first so many numbers of a token decide its gate (nanochat: 24; modded-nanogpt: 12)."""

    def saved_activations(self, d_model: int) -> Activations:
        """Returns what autograd saves of one token: it, the one before, and the gate before and behind its factor."""
        return Activations(2 * d_model + 2, 0)

    def flops(self, d_model: int) -> int:
        """Returns the FLOPs of one token: those of the gate, and of the sum."""
        return 2 * (self.channels + d_model)


class Smear(Declares, nn.Module):
    """x_t + scale * sigmoid(w . x_t[:channels]) x_(t-1), nothing for the first token of a document; scale and w are 0 at first.

    Of modded-nanogpt (https://github.com/KellerJordan/modded-nanogpt) and nanochat, whose w is drawn from 0 to 0.02 and whose tokens have
    been normalised (model.embed.norm). x-transformers' shift_tokens moves channels instead, in each layer.
    """

    initializers = {"gate": zeros, "scale": zeros}

    def __init__(self, cfg: SmearConfig, d_model: int, layer: int) -> None:
        """layer: the number under which a cache keeps the last token, behind those of all layers."""
        super().__init__()
        self.channels, self.d_model, self.layer = cfg.channels, d_model, layer
        self.gate, self.scale = nn.Parameter(torch.empty(cfg.channels)), nn.Parameter(torch.empty(1))

    def state(self) -> Fixed:
        """Returns what a cache keeps of a row: its last token, as it was before the mix."""
        return Fixed(((1, self.d_model),))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """(b, s, d) -> (b, s, d)."""
        before, after = previous(x, ctx.mask, ctx.cache, self.layer)
        if ctx.cache is not None:
            ctx.cache.advance(self.layer, after)
        share = self.scale * (x[..., : self.channels] * self.gate).sum(-1, keepdim=True).sigmoid()  # (b, s, d) -> (b, s, 1)
        return x + share * before

    def extra_repr(self) -> str:
        return f"by {self.channels} of {self.d_model}"
