"""Attention and a recurrence side by side.  Falcon-H1: Zuo et al. 2025, arXiv:2507.22448, section 2; Hymba, arXiv:2411.13676."""

from torch import Tensor

from lm.nn.activation_memory import Activations, sum_activations
from lm.nn.context import Context
from lm.nn.mixers.base import Mixer, MixerConfig, RecurrentConfig
from lm.nn.norm import NormConfig
from lm.ops.cache.cache import State


class BothConfig(MixerConfig):
    """The mixer of layers that `pattern` calls both; it is made of the model's two slots."""

    attention: MixerConfig
    recurrent: RecurrentConfig
    attention_scale: float
    """Factor on what attention gives."""
    recurrent_scale: float
    """Factor on what the recurrence gives."""

    @property
    def parts(self) -> tuple[MixerConfig, MixerConfig]:
        """Returns what stands side by side."""
        return self.attention, self.recurrent

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        return self.build_in(0, norm, d_model, layer)

    def build_in(self, vocab_size: int, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        attention, recurrent = (part.build_in(vocab_size, norm, d_model, layer) for part in self.parts)
        return Both(self, attention, recurrent, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        return sum(part.flops(d_model, layer, seq_len) for part in self.parts)

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        return sum_activations([part.saved_activations(d_model, layer) for part in self.parts])

    def kernel_outputs(self, d_model: int, layer: int) -> Activations:
        return sum_activations([part.kernel_outputs(d_model, layer) for part in self.parts])

    def saved_scores(self, seq_len: int, device: str) -> Activations:
        return sum_activations([part.saved_scores(seq_len, device) for part in self.parts])

    def states(self, d_model: int, layer: int) -> tuple[State, ...]:
        return *self.attention.states(d_model, layer), *self.recurrent.states(d_model, layer)

    def why_not_context_parallel(self, n: int) -> str | None:
        return self.attention.why_not_context_parallel(n) or self.recurrent.why_not_context_parallel(n)


class Both(Mixer):
    """a attention(x) + r recurrent(x)."""

    def __init__(self, cfg: BothConfig, attention: Mixer, recurrent: Mixer, layer: int) -> None:
        super().__init__(layer)
        self.attention, self.recurrent = attention, recurrent
        self.scales = cfg.attention_scale, cfg.recurrent_scale

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        attended, carried = (part(x, ctx) for part in (self.attention, self.recurrent))
        a, r = self.scales
        return (attended if a == 1.0 else a * attended) + (carried if r == 1.0 else r * carried)
