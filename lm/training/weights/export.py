"""Writes a model folder from a run's checkpoint with one weight in memory at a time, however many ranks wrote the checkpoint."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.schema import Tree
from lm.storage.atomic import atomic_folder, write_json
from lm.storage.checkpoint import CheckpointReader, require_finite
from lm.storage.formats import FORMAT
from lm.storage.model_folder import CONFIG, IMPORTED, WEIGHTS, validated

_KEPT = ("model", "adapter", "parent", "parent_hash", *IMPORTED, "step", "tokenizer_hash", "plugins")  # metadata for config.json
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # of the safetensors format


def export_model(folder: Path, reader: CheckpointReader, save_tokenizer: Callable[[Path], None], run: str) -> None:
    """Writes the model folder, with the averaged weights where the checkpoint has them, in the weights' dtype.  run: name of the run."""
    names = sorted(reader.names(), key=lambda name: (-reader.dtype(name).itemsize, name))  # so that every tensor is aligned
    dtypes = {name: reader.dtype(name) for name in names}
    size = sum(math.prod(reader.shape(name)) * dtype.itemsize for name, dtype in dtypes.items())
    with atomic_folder(folder, size) as temporary:
        _write_weights(temporary / WEIGHTS, reader, dtypes)
        write_json(temporary / CONFIG, {"format": FORMAT, "run": run, **{key: reader.meta.get(key) for key in _KEPT}})
        save_tokenizer(temporary)


def _write_weights(path: Path, reader: CheckpointReader, dtypes: dict[str, torch.dtype]) -> None:
    """Writes a safetensors file: length of the header, the header, and the tensors in the header's order."""
    header: Tree = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype in dtypes.items():
        shape = reader.shape(name)
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in dtypes:
            file.write(_bytes(name, reader))


def _bytes(name: str, reader: CheckpointReader) -> Any:
    tensor: Tensor = validated(reader, name)
    require_finite(name, tensor)
    return tensor.view(torch.uint8).numpy().data
