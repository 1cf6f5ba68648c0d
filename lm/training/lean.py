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
_ASKED = "__getattr__"  # of a module: called for what it has not (PEP 562)
_NEEDED = {"__version__": "__about__", "Metric": "metric", "MetricCollection": "collections"}


@contextmanager
def without_metrics() -> Iterator[None]:
    """To import Lightning in. Has no effect where torchmetrics is imported already, or is another than is known here."""
    part = _part()
    yield
    if part is not None and _ASKED in part.__dict__:
        del part.__path__  # what is imported of it from now on looks for this


def _part() -> ModuleType | None:
    """Returns the package without its `__init__`, which runs as soon as more is asked of it, such as a metric or a further module."""
    if _NAME in sys.modules or (spec := find_spec(_NAME)) is None or (loader := spec.loader) is None:
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

    def whole(name: str) -> Any:
        del part.__dict__[_ASKED]
        part.__path__ = spec.submodule_search_locations or []
        loader.exec_module(part)
        return getattr(part, name)

    part.__dict__[_ASKED] = whole
    return part
