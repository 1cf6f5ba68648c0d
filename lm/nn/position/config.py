"""The slot of positions."""

from lm.config import Slot


class PositionConfig(Slot, group="model/position"):
    """How a model knows the order of its tokens."""
