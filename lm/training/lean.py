"""Lightning needs three names of torchmetrics, whose package imports scipy.signal and transformers for its metrics: a third of the CPU
time that a run spends before its first step, and 90 MiB in each of its processes."""

import logging
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Any

_NAME = "torchmetrics"
_ASKED = "__getattr__"  # of a module: called for what it has not (PEP 562)
_NEEDED = {"__version__": "__about__", "Metric": "metric", "MetricCollection": "collections"}


def leave_out_metrics() -> None:
    """Makes Lightning, where it is imported from now on, find torchmetrics without its metrics: these are imported as soon as one of them
    is asked for. Has no effect where torchmetrics is imported already, or is another than is known here."""
    if _NAME in sys.modules or (spec := find_spec(_NAME)) is None or (loader := spec.loader) is None:
        return
    part = sys.modules[_NAME] = module_from_spec(spec)
    part.__dict__["_logger"] = logging.getLogger(_NAME)
    try:
        import_module(f"{_NAME}.utilities")  # first: the others import each other through it
        part.__dict__.update({name: getattr(import_module(f"{_NAME}.{module}"), name) for name, module in _NEEDED.items()})
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
            del sys.modules[name]
        return

    def whole(name: str) -> Any:
        del part.__dict__[_ASKED]
        loader.exec_module(part)
        return getattr(part, name)

    part.__dict__[_ASKED] = whole
