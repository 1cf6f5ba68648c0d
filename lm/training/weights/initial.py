"""Where the weights of a run come from before its first step; and models built piece by piece, so that no rank holds one whole."""

from collections.abc import Callable, Container, Iterable, Iterator
from weakref import WeakValueDictionary

import torch
from torch import nn

from lm.adapters.adapter import AdapterConfig, adapting, round_beside
from lm.errors import CheckpointError
from lm.generation.load import load
from lm.nn.init import init_weights
from lm.nn.transformer import LM, build_model, model_config
from lm.storage.adapted import read_merged
from lm.storage.checkpoint import CheckpointReader, Piece
from lm.storage.model_folder import copy_weights, read_config, require_same_shapes, resolve_model

Fill = Callable[[LM, Container[str]], None]  # write the parameters of these names, which are on a device and whole


def drawn(seed: int) -> Fill:
    """From the seed and each parameter's name."""

    def fill(model: LM, names: Container[str]) -> None:
        init_weights(model, model.cfg.init, model.cfg.growth(), model.sublayers, seed, names)

    return fill


def copied(path: str) -> Fill:
    """Of a run, model or checkpoint folder; raises CheckpointError where the shapes differ."""
    source = resolve_model(path)
    _, weights = read_merged(source)
    fitting: list[LM] = []

    def fill(model: LM, names: Container[str]) -> None:
        if not fitting:  # before any of them is cut
            require_same_shapes(_shapes(model), {name: tuple(weight.shape) for name, weight in weights.items()}, str(source))
            fitting.append(model)
        mine = [(name, p) for name, p in model.named_parameters() if name in names]
        copy_weights(mine, {name: weights[name] for name, _ in mine}, str(source))

    return fill


def require_fit(model: LM, path: str) -> None:
    """Raises CheckpointError as `copied` does, by configs alone."""
    source = resolve_model(path)
    require_same_shapes(_shapes(model), _shapes(build_model(model_config(read_config(source)["model"]), device="meta")), str(source))


def beside(base: Fill, own: Fill) -> Fill:
    """The weights of an adapter by `own`, and all others by `base`."""

    def fill(model: LM, names: Container[str]) -> None:
        added = adapting(model)
        base(model, [name for name, _ in model.named_parameters() if name in names and name not in added])
        own(model, [name for name in added if name in names])

    return fill


_parents: WeakValueDictionary[str, LM] = WeakValueDictionary()


def parent(path: str, adapter: AdapterConfig | None) -> LM:
    """Returns the frozen model that a run started from, on the CPU: the same one to all who hold it.  adapter: beside which its matrices
    are rounded."""
    model = _parents.get(f"{path} {adapter}")
    if model is None:
        with torch.inference_mode(False):  # a validation may be the first to ask
            model = _parents[f"{path} {adapter}"] = load(path, "cpu")[0].requires_grad_(False)
            if adapter is not None:
                round_beside(model, adapter)
    return model


def empty(model: LM, names: Container[str]) -> None:
    """A checkpoint is read when the engine stands, by each rank what it holds."""


@torch.no_grad()
def load_pieces(pieces: Iterable[Piece], reader: CheckpointReader) -> None:
    """Fills live slices, each from its own place in the checkpoint; CheckpointError where the checkpoint lacks one."""
    for piece in pieces:
        if piece.kind not in reader.kinds(piece.name):
            raise CheckpointError(
                f"{reader.folder}: the optimizer's {piece.kind} of {piece.name} is missing, and a resumed run needs it."
                " Set resume.fresh_optimizer=true to start the optimizer anew."
            )
        piece.tensor.copy_(reader.read(piece.name, piece.kind, piece.offset, tuple(piece.tensor.shape)))


def _shapes(model: LM) -> dict[str, tuple[int, ...]]:
    added = adapting(model)
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters() if name not in added}


def materialized(model: LM, parts: list[nn.Module], device: torch.device, fill: Fill) -> Iterator[nn.Module]:
    """Each part of a model on the meta device, filled and ready to be sharded before the next one; at last what lies outside of them."""
    for part in parts:
        prefix = next(name for name, module in model.named_modules() if module is part)
        names = {f"{prefix}.{name}" for name, p in part.named_parameters() if p.is_meta}
        if names:
            part.to_empty(device=device)
            fill(model, names)
        yield part
    rest = {name for name, p in model.named_parameters() if p.is_meta}
    for module in model.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
    model.tie()
    if rest:
        fill(model, rest)
    yield model
