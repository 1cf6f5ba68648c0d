"""Folders that hold an adapter alone, and name the model that it belongs to by path and hash."""

import os
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lm.adapters.adapter import AdapterConfig
from lm.errors import CheckpointError, LmError
from lm.nn.model_config import model_config
from lm.schema import Config, Tree
from lm.storage.manifest import MANIFEST, verify
from lm.storage.model_folder import folder_hash, number_bytes, read_config, read_model, resolve_model
from lm.storage.reading import checked

_NAMES_PATHS = ("files", "val_files", "path", "init_from", "teacher", "reward_model")


class Adapted(Config):
    """What such a folder says of itself, beside the config of the model."""

    adapter: AdapterConfig
    parent: str
    """The model that it was trained on, as init_from named it."""
    parent_hash: str
    """`folder_hash` of that one."""

    @classmethod
    def of(cls, folder: Path, tree: Tree) -> Self | None:
        """Returns what the folder says of its adapter; None where it holds a whole model.  tree: config.json, or a checkpoint's meta
        data."""
        found = None if tree.get("adapter") is None else {key: tree.get(key) for key in cls.model_fields}
        return None if found is None else checked(cls, found, folder)

    def source(self, folder: Path) -> Path:
        """Returns the parent's folder, found as in `near`, or under another name beside there or beside the adapter's run. Raises
        CheckpointError where there is none, or it holds another model by now."""
        named, parent = near(self.parent, folder), None
        try:
            if named.exists():
                parent = resolve_model(str(named))
                if folder_hash(parent) == self.parent_hash:
                    return parent
        except CheckpointError:  # another run has the name by now, perhaps, and no model yet
            if (moved := self._moved(folder)) is None:
                raise
            return moved
        if (moved := self._moved(folder)) is not None:
            return moved
        if parent is None:
            raise CheckpointError(
                f"{folder}: it holds an adapter of {self.parent}, which is neither here nor beside it. Bring that back to where it was."
            )
        raise CheckpointError(
            f"{folder}: it holds an adapter of {self.parent}, and {parent} is another model by now. Restore that, or train again."
        )

    def _moved(self, folder: Path) -> Path | None:
        """Returns where the same model lies by now; None where it is nowhere near."""
        places = [near(os.path.dirname(self.parent) or ".", folder), *folder.absolute().parents[:3]]
        models = (
            model for each in chain.from_iterable(map(_inside, places)) for model in (each, each / "model", *_inside(each / "checkpoints"))
        )
        return next((model for model in models if _hash(model) == self.parent_hash and _whole(model)), None)


def adapters_of(run: Path) -> list[Path]:
    """Returns the runs beside a run that hold an adapter of its final model."""
    own, found = _hash(run / "model"), []
    for other in _inside(run.absolute().parent) if own is not None else []:
        try:
            tree = read_config(other / "model")
        except (LmError, OSError):
            continue
        if tree.get("adapter") is not None and tree.get("parent_hash") == own:
            found.append(run.parent / other.name)
    return found


def _inside(folder: Path) -> list[Path]:
    """Returns what is in a folder; nothing of what is none, or closed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _whole(folder: Path) -> bool:
    """Whether all files of a model are as its manifest says: a copy may be under way."""
    try:
        verify(folder)
    except (LmError, OSError):
        return False
    return True


def _hash(folder: Path) -> str | None:
    """Returns `folder_hash`; None for a folder of no model."""
    try:
        return folder_hash(folder) if (folder / MANIFEST).is_file() else None
    except (LmError, OSError):
        return None


def near(named: str, folder: Path) -> Path:
    """Returns where a path leads that a run names: from here, or else from one of the folders above `folder`, which belongs to the run; the
    path itself where it leads nowhere."""
    places = [Path(), *folder.absolute().parents]
    return next((path for place in places if (path := place / os.path.expanduser(named)).exists()), Path(named))


def placed(tree: Any, folder: Path, whole: bool = False) -> Any:
    """Returns a run's config with paths that lead from here to the files and folders that it names, as `place`."""
    if isinstance(tree, dict):
        hub = tree.get("kind") == "hub"
        return {key: (_paths if names_paths(key, value, hub) else placed)(value, folder, whole) for key, value in tree.items()}
    return [placed(each, folder, whole) for each in tree] if isinstance(tree, list) else tree


def names_paths(key: str, value: Any, hub: bool = False) -> bool:
    """Whether the value of this key, such as data.files, names files or folders. That of a chat template does where it has an ending: else
    it may be chatml.  hub: it is an option of data=hub, whose name may be a folder."""
    last = key.rpartition(".")[2]
    return last in _NAMES_PATHS or (hub and last == "name") or (last == "template" and bool(Path(str(value)).suffix))


def _paths(value: Any, folder: Path, whole: bool) -> Any:
    if isinstance(value, list):
        return [_paths(each, folder, whole) for each in value]
    return place(value, folder, whole) if isinstance(value, str) else value


def place(named: str, folder: Path, whole: bool) -> str:
    """Returns a path that leads from here to what a run names, `near` its folder: as it stands where it leads there, or where nothing does.

    whole: the absolute path, by which two spellings of one file are the same.
    """
    path = near(named, folder)
    if not named or not path.exists() or (not whole and os.path.exists(os.path.expanduser(named))):
        return named
    return str(path.resolve())


def read_merged(folder: Path) -> tuple[Tree, dict[str, Tensor]]:
    """As `read_model`; an adapter is merged into the weights of its parent. Raises CheckpointError where it does not fit them."""
    tree, own = read_model(folder)
    if (adapted := Adapted.of(folder, tree)) is None:
        return tree, own
    weights = _parent_weights(folder, adapted, tree, own)
    try:
        adapted.adapter.merge(weights, own)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: the adapter does not fit the weights of {adapted.parent} ({error}). Use another.") from None
    return tree, weights


def merged_bytes(folder: Path) -> int:
    """Returns how many bytes each number takes of the weights that `read_merged` returns: those of the wider of adapter and parent."""
    adapted = Adapted.of(folder, read_config(folder))
    return max(number_bytes(folder), 0 if adapted is None else merged_bytes(adapted.source(folder)))


def read_apart(folder: Path) -> tuple[Tree, dict[str, Tensor]]:
    """As `read_merged`, with the adapter's weights beside those of the parent."""
    tree, own = read_model(folder)
    adapted = Adapted.of(folder, tree)
    return tree, own if adapted is None else _parent_weights(folder, adapted, tree, own) | own


def _parent_weights(folder: Path, adapted: Adapted, tree: Tree, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parent's weights, in the adapter's dtype where that is wider, and without a head for other labels."""
    dtype = next((tensor.dtype for tensor in own.values()), torch.float32)
    before, weights = read_merged(adapted.source(folder))
    now, then = (model_config(each["model"], str(folder)) for each in (tree, before))
    kept = weights.keys() - now.new_in_head(then)
    return {name: weight.to(torch.promote_types(weight.dtype, dtype)) for name, weight in weights.items() if name in kept}
