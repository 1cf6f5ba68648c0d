"""The slot of what mixes tokens."""

from lm.config import Slot


class AttentionConfig(Slot, group="model/attention"):
    """How a layer lets tokens read each other by attention."""
