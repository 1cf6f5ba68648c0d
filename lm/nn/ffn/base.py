"""The slot of feed-forward layers."""

from lm.config import Slot


class FFNConfig(Slot, group="model/ffn"):
    """What a layer computes of each token alone."""
