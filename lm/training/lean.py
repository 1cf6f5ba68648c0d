"""Lightning needs three names of torchmetrics, whose package imports scipy.signal and transformers for its metrics: a third of the CPU
time that a run spends before its first step, and 90 MiB in each of its processes."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_NAME = "torchmetrics"
_NEEDED = {"__version__": "__about__", "Metric": "metric", "MetricCollection": "collections"}


class _Part(ModuleType):
    """The package before its `__init__` has run, which runs as soon as more is asked of it, such as a metric or a further module."""

    def __getattr__(self, name: str) -> Any:
        spec, self.__class__ = self.__spec__, ModuleType  # type: ignore[assignment]
        assert spec is not None and spec.loader is not None
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(self)
        return getattr(self, name)


@contextmanager
def without_metrics() -> Iterator[None]:
    """To import Lightning in. Has no effect where torchmetrics is imported already, or is another than is known here."""
    part = _part()
    yield
    if part is not None and type(part) is _Part:
        del part.__path__  # what is imported of it from now on looks for this


def _part() -> ModuleType | None:
    if _NAME in sys.modules or (spec := find_spec(_NAME)) is None:
        return None
    part = sys.modules[_NAME] = module_from_spec(spec)
    part.__dict__["_logger"] = logging.getLogger(_NAME)
    try:
        import_module(f"{_NAME}.utilities")  # first: the others import each other through it
        part.__dict__.update({name: getattr(import_module(f"{_NAME}.{module}"), name) for name, module in _NEEDED.items()})
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
            del sys.modules[name]
        return None
    part.__class__ = _Part
    return part
