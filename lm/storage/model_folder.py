"""The model folder that is handed on: model.safetensors, config.json and the tokenizer, under one manifest.

Torch is imported only where weights are handled, not to resolve a path or to read a config.
"""

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from lm.errors import CheckpointError
from lm.schema import Tree
from lm.storage.atomic import write_json
from lm.storage.checkpoint import META, CheckpointReader, checkpoints, read_meta, require_finite
from lm.storage.formats import FORMAT, current
from lm.storage.manifest import MANIFEST, verify, verify_file
from lm.storage.out import out_folder
from lm.storage.reading import read_json, require_open
from lm.storage.run_folder import RunFolder, nearest_run

if TYPE_CHECKING:
    from torch import Tensor, nn

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LATEST = "latest"
IMPORTED = ("family", "sampling", "card", "prompts", "asked_as")
"""Keys of config.json that stay with what is trained of a model, and say how it is exported, and read."""
_OURS = ("runs", "models", "checkpoints")  # folders that lm, or its documentation, makes
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def save_model(
    folder: Path, config: Tree, weights: "Mapping[str, Tensor]", save_tokenizer: Callable[[Path], None], extra: Tree, overwrite: bool = True
) -> None:
    """Writes a model folder.  config: the model's own; extra: further keys of config.json (the parent of a fine-tune, say).

    Raises NumericsError for weights that are not finite, and as `out_folder`.
    """
    from safetensors.torch import save_file

    tensors = {name: weight.detach().contiguous().cpu() for name, weight in weights.items()}
    for name, tensor in tensors.items():
        require_finite(name, tensor)
    with out_folder(folder, overwrite, sum(tensor.nbytes for tensor in tensors.values())) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        write_json(temporary / CONFIG, {"format": FORMAT, "model": config, **extra})
        save_tokenizer(temporary)


def read_model(folder: Path) -> "tuple[Tree, dict[str, Tensor]]":
    """Returns config.json and the weights, verified; of a checkpoint folder, its meta data and the weights as `validated`."""
    if (folder / META).is_file():
        reader = CheckpointReader(folder)
        return reader.meta, {name: validated(reader, name) for name in reader.names()}
    from safetensors.torch import load_file

    _refuse_pickles(folder)
    config = read_config(folder)
    verify(folder)
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: cannot be read ({error}). Use another model folder.") from None
    for name, weight in weights.items():
        if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
            raise CheckpointError(
                f"{folder / WEIGHTS}: {name} is {weight.dtype}, and weights are fp32, fp16 or bf16. Use another model folder."
            )
        require_finite(name, weight, str(folder), "Use an earlier checkpoint")
    return config, weights


def validated(reader: CheckpointReader, name: str) -> "Tensor":
    """Returns a weight as validation has seen it: its moving average (EMA), where there is one, which is float32, in the weight's dtype."""
    return reader.read(name, "ema" if "ema" in reader.kinds(name) else "weight").to(reader.dtype(name))


def read_config(folder: Path) -> Tree:
    """Returns config.json of a model folder, or the meta data of a checkpoint, verified, with today's keys; the weights are not read."""
    if (folder / META).is_file():
        verify_file(folder, META)
        return read_meta(folder)
    config = read_json(folder / CONFIG)
    if "model_type" in config and "format" not in config:
        remedy = f"Make it ours first: lm import {quote(f'from={folder}')} out=FOLDER"
        raise CheckpointError(f"{folder}: this is a Hugging Face model. {remedy}.")
    verify_file(folder, CONFIG)
    return current(config, folder / CONFIG)


def number_bytes(folder: Path) -> int:
    """Returns how many bytes each number of a folder's weights takes, from the first tensor's description; 4 where that cannot be read."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.weights.safetensors")) if (folder / META).is_file() else [folder / WEIGHTS]
    try:
        with safe_open(files[0], "pt") as file:
            return int(file.get_slice(min(file.keys())).get_dtype().strip("BF")) // 8
    except (OSError, SafetensorError, IndexError, ValueError):
        return 4


def folder_hash(folder: Path) -> str:
    """Returns the SHA-256 of the manifest of a model or checkpoint folder, which lists the SHA-256 of each file."""
    manifest = folder / MANIFEST
    read_json(manifest)
    return hashlib.sha256(manifest.read_bytes()).hexdigest()


def meant(path: str, but: str | None = None) -> str:
    """Returns the folder that a path stands for: `latest` for the run in runs/ that ended last, a pattern for the one folder that matches;
    any other path as it is. Raises CheckpointError where there is no such folder, or a pattern matches several.

    but: name of a run that is never meant.
    """
    if not path.strip():
        raise CheckpointError("model folder: '' names none. Give a folder that lm train or lm import wrote.")
    if os.path.lexists(os.path.expanduser(path)) or (path != LATEST and not glob.has_magic(path)):
        return path
    if path == LATEST:
        models = [file for file in Path("runs").glob(f"*/model/{CONFIG}") if file.parent.parent.name != but]
        ended = {file.parent.parent: file.stat().st_mtime_ns for file in models}
        if not ended:
            raise CheckpointError(f"{path}: no run in {Path.cwd() / 'runs'} has ended. Give a folder that lm train or lm import wrote.")
        return str(max(ended, key=lambda run: (ended[run], run)))
    marks = (CONFIG, META, f"model/{CONFIG}")
    folders = [each for each in sorted(glob.glob(os.path.expanduser(path))) if Path(each).name != but]
    found = [each for each in folders if any((Path(each) / mark).is_file() for mark in marks)]
    if len(found) != 1:
        told = f"{len(found)} match it, {', '.join(found[:5])}" if found else "none matches it"
        raise CheckpointError(f"{path}: a pattern stands for one run, model or checkpoint folder, and {told}. Name one.")
    return found[0]


def _may_be_of_hub(path: str) -> bool:
    """Whether it is owner/name, and neither in a folder of ours nor the name of a run."""
    owner, _, name = path.partition("/")
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and owner not in _OURS
    return named and not os.path.exists(owner) and not os.path.exists(f"runs/{name}")


def resolve_model(path: str) -> Path:
    """Returns the folder that `read_model` takes: of a model or checkpoint folder itself, of a run folder or its checkpoints/ the run's
    model/; `latest` and patterns stand for what `meant` returns. Raises CheckpointError where there is none."""
    folder = Path(os.path.expanduser(meant(path)))
    require_open(folder)
    if not folder.exists():
        where = "" if folder.is_absolute() else f" in {Path.cwd()}"
        to_hub = f"Check the path, or import a model of the hub first: lm import from={path} out=models/{folder.name}."
        remedy = to_hub if _may_be_of_hub(path) else nearest_run(folder)
        raise CheckpointError(f"{path}: does not exist{where}, but a run, model or checkpoint folder is needed. {remedy}")
    if folder.is_file():
        _refuse_pickles(folder)
        raise CheckpointError(f"{path}: is a file, but a run, model or checkpoint folder is needed. Give {_folder_of(folder)}.")
    if (folder / CONFIG).is_file() or (folder / META).is_file():
        return folder
    run = RunFolder(folder)
    if not run.exists() and (around := RunFolder(folder.parent)).checkpoints == folder:
        run = around
    if (run.model / CONFIG).is_file():
        return run.model
    if run.exists():
        newest = next(iter(checkpoints(run.checkpoints)), None)
        remedy = f"Finish the run, or give its newest checkpoint, {newest}" if newest is not None else "Finish the run"
        raise CheckpointError(f"{path}: the run has no model/ yet; its end writes it. {remedy}.")
    _refuse_pickles(folder)
    runs = sorted(file.parent for file in folder.glob("*/config.yaml"))
    remedy = f"Give one of the runs in it, such as {runs[0]}." if runs else nearest_run(folder)
    raise CheckpointError(f"{path}: neither {CONFIG} nor model/{CONFIG} is there, so it is no run or model folder. {remedy}")


def is_ours(folder: Path) -> bool:
    """Returns whether this is a run, model or checkpoint folder of lm, and of no other program."""
    if (folder / CONFIG).is_file():
        config = read_json(folder / CONFIG, foreign=True)
        return {"format", "model"} <= config.keys() and "model_type" not in config
    run = RunFolder(folder)
    return (folder / META).is_file() or (run.exists() and (run.model.is_dir() or run.checkpoints.is_dir()))


def _folder_of(file: Path) -> str:
    """Returns, in words, the model, checkpoint or run folder that a file lies in."""
    marks = (CONFIG, META, "config.yaml")
    found = next((parent for parent in file.parents[:3] if any((parent / mark).is_file() for mark in marks)), None)
    return "a folder" if found is None else f"its folder, {found}"


def require_same_shapes(
    model: Mapping[str, tuple[int, ...]],
    saved: Mapping[str, tuple[int, ...]],
    where: str,
    remedy: str = "Use the model config that it was saved with",
) -> None:
    """Raises CheckpointError with the first five names whose shapes differ, or that one side lacks. A tied head is stored once."""
    wrong = [name for name in dict.fromkeys([*model, *saved]) if model.get(name) != saved.get(name)]
    if not wrong:
        return
    shown = "; ".join(f"{name} is {_shape(saved.get(name))} there and {_shape(model.get(name))} in the model" for name in wrong[:5])
    more = f" (5 of {len(wrong)})" if len(wrong) > 5 else ""
    raise CheckpointError(f"{where}: the weights do not fit the model: {shown}{more}. {remedy}.")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a scalar"


def copy_weights(named: "Iterable[tuple[str, nn.Parameter]]", weights: "dict[str, Tensor]", where: str) -> None:
    """Fills every parameter in place, and empties `weights`, so that none is there twice; raises as `require_same_shapes`."""
    parameters = dict(named)
    require_same_shapes({n: tuple(p.shape) for n, p in parameters.items()}, {n: tuple(w.shape) for n, w in weights.items()}, where)
    import torch

    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights.pop(name))


def _refuse_pickles(path: Path) -> None:
    if (path / WEIGHTS).is_file():
        return
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if file.suffix in _PICKLES:
            raise CheckpointError(f"{file}: a pickle can run any code when it is read, so it is refused. Convert it to safetensors first.")
