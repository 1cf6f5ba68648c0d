"""lm: pretrain, fine-tune, ablate and sample Transformer language models built from named slots."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Batch": "lm.nn.batch",
    "build_model": "lm.nn.transformer",
    "DecoderConfig": "lm.nn.transformer",
    "EncoderConfig": "lm.nn.transformer",
    "EncoderDecoderConfig": "lm.nn.transformer",
    "load": "lm.generation.load",
    "generate": "lm.generation.load",
}

if TYPE_CHECKING:
    from lm.generation.load import generate, load
    from lm.nn.batch import Batch
    from lm.nn.transformer import DecoderConfig, EncoderConfig, EncoderDecoderConfig, build_model

__all__ = [
    "Batch",
    "DecoderConfig",
    "EncoderConfig",
    "EncoderDecoderConfig",
    "__version__",
    "build_model",
    "generate",
    "load",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lm' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(__all__)
