"""Layers without a mixer."""

from lm.nn.activation_memory import Activations
from lm.nn.mixers.base import Mixer, MixerConfig
from lm.nn.norm import NormConfig
from lm.ops.cache.cache import State


class NoMixerConfig(MixerConfig):
    """What stands for the mixer in layers that are a feed-forward alone; no user chooses it."""

    sublayers = 0

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        raise AssertionError("a layer without a mixer builds none")

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        return 0

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        return Activations(0, 0)

    def states(self, d_model: int, layer: int) -> tuple[State, ...]:
        return ()

    def why_not_context_parallel(self, n: int) -> str | None:
        return None

    def divided(self, d_model: int, n: int) -> "NoMixerConfig":
        return self
