"""What a block knows of the forward that it is part of, beside its input."""

from dataclasses import dataclass, field

from torch import Tensor

from lm.nn.cache import Cache
from lm.nn.mask import Mask
from lm.nn.position import Angles, Position


@dataclass
class Context:
    """Passed through every block of one forward; blocks read it and add to `losses`."""

    position: Position
    mask: Mask
    angles: Angles | None = None
    cache: Cache | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)  # name -> scalar, summed over layers
    _cached_masks: dict[int, Mask] = field(default_factory=dict)

    def keys(self, layer: int) -> Mask:
        """The mask over the keys that this layer sees: those of the input, or those in its cache."""
        if self.cache is None:
            return self.mask
        k_positions = self.cache.positions(layer)
        if id(k_positions) not in self._cached_masks:
            self._cached_masks[id(k_positions)] = Mask(self.mask.q_positions, k_positions, causal=self.mask.causal)
        return self._cached_masks[id(k_positions)]
