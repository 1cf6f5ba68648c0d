"""What one layer is made of, as the model hands it down to the block."""

from dataclasses import dataclass
from typing import Literal

from lm.nn.activation_memory import Activations, sum_activations
from lm.nn.ffn.base import FFNConfig
from lm.nn.mixers.base import AttentionConfig, MixerConfig
from lm.nn.norm import NormConfig
from lm.nn.per_layer import PerLayerConfig
from lm.nn.residual import ResidualConfig

SlotOfLayer = Literal["attention", "recurrent", "both", "ffn"]
"""What a layer is called by: its mixer, both mixers side by side, or its feed-forward where it has no mixer."""
ATTENDING: tuple[SlotOfLayer, ...] = ("attention", "both")
RECURRENT: tuple[SlotOfLayer, ...] = ("recurrent", "both")


@dataclass(frozen=True)
class BlockParts:
    """The configs that the block of one layer is built of, as the model hands them down."""

    layer: int
    norm: NormConfig
    slot: SlotOfLayer
    mixer: MixerConfig
    cross: AttentionConfig | None  # cross-attention to a source; None: without
    ffn: FFNConfig
    residual: ResidualConfig
    d_model: int
    dropout: float
    vocab_size: int = 0
    n_layers: int = 1  # of the stack
    per_layer: PerLayerConfig | None = None

    @property
    def mixers(self) -> list[MixerConfig]:
        """The mixer, and behind it the cross-attention where there is one."""
        return [self.mixer] if self.cross is None else [self.mixer, self.cross]

    @property
    def sublayers(self) -> int:
        """How many there are."""
        return sum(mixer.sublayers for mixer in self.mixers) + self.ffn.sublayers

    def sublayer(self, nth: int) -> SlotOfLayer:
        """Returns the slot of the nth sublayer."""
        return self.slot if nth == 0 else "ffn" if nth == len(self.mixers) else "attention"

    def saved_activations(self) -> Activations:
        """Returns what autograd saves of one token within the sublayers."""
        d, layer = self.d_model, self.layer
        own = [] if self.per_layer is None else [self.per_layer.saved_activations(d)]
        return sum_activations([*(mixer.saved_activations(d, layer) for mixer in self.mixers), self.ffn.saved_activations(d, layer), *own])

    def kernel_outputs(self) -> Activations:
        """Returns the outputs of fused kernels and stacked matrices for one token."""
        d, layer = self.d_model, self.layer
        return sum_activations([*(mixer.kernel_outputs(d, layer) for mixer in self.mixers), self.ffn.kernel_outputs(d, layer)])

    def flops(self, seq_len: int) -> int:
        """Returns the FLOPs of one token in a full row, without those of linear layers."""
        return sum(mixer.flops(self.d_model, self.layer, seq_len) for mixer in self.mixers) + self.ffn.flops(self.d_model, self.layer)
