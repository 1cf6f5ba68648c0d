"""The slots for a plugin's own callbacks and metrics."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from lm.schema import Slot, Tree


class CallbackConfig(Slot):
    """Something of one's own that happens between steps."""

    @abstractmethod
    def build(self) -> Any:
        """Returns a lightning.Callback; it is called after the built-in ones, but before a save, on every rank."""


class MetricConfig(Slot):
    """Numbers of one's own for each line of metrics.jsonl."""

    @abstractmethod
    def build(self) -> Callable[[Any, Any], Tree]:
        """Returns a function of (trainer, module) that returns numbers by name; every rank calls it, and the first rank's are written."""
