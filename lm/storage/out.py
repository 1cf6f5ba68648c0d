"""The folder that `out=` names: a new one, or with `overwrite=true` one that a verb has written before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lm.errors import CheckpointError, ConfigError, ResourceError, expect
from lm.storage.atomic import atomic_folder
from lm.storage.manifest import MANIFEST, listed_files, unlisted_files
from lm.storage.run_folder import RunFolder


@contextmanager
def out_folder(out: Path, overwrite: bool, needed_bytes: int = 0) -> Iterator[Path]:
    """As `atomic_folder`, with the check of `require_free` before the block and at its end. Raises as both."""
    require_free(out, overwrite)
    try:
        with atomic_folder(out, needed_bytes, replace=overwrite) as temporary:
            yield temporary
            require_free(out, overwrite)
    except ResourceError:
        require_free(out, overwrite)  # another writer was faster
        raise


def require_free(out: str | os.PathLike[str], overwrite: bool, *read: str | os.PathLike[str]) -> Path:
    """Returns `out` as a path. Raises ConfigError where it exists; with `overwrite`, only where it is not a folder of its own that a verb
    has written; and where it lies in a folder with a manifest, which nothing could read any more.

    read: folders that are read for the new one: none may lie in `out`, where it would be replaced.
    """
    expect("out", out, (str, os.PathLike), "Give the folder to write")
    expect("overwrite", overwrite, bool, "Give True or False")
    path = Path(os.path.expanduser(out))
    for source in read:
        there = Path(os.path.expanduser(source))
        if there.exists() and there.resolve().is_relative_to(path.resolve()):  # else it is a name on the hub
            raise ConfigError(f"out={out}: {os.fspath(source)} is read from there, and would be replaced. Choose another folder.")
    if (around := next(filter(_sealed, Path(os.path.realpath(path.parent), "_").parents), None)) is not None:
        raise ConfigError(f"out={out}: it lies in {around}, where only what its {MANIFEST} lists may be. Choose a folder outside of it.")
    if not os.path.lexists(path):
        return path
    if not overwrite:
        raise ConfigError(f"out={out}: it exists already. Add overwrite=true to replace it, or choose another folder.")
    if (found := _foreign(path)) is not None:
        raise ConfigError(f"out={out}: {found}, so it is not overwritten. Choose another folder, or remove it yourself.")
    return path


def _sealed(folder: Path) -> bool:
    """Whether the folder has a manifest of lm."""
    try:
        return os.path.lexists(folder / MANIFEST) and bool(listed_files(folder))
    except CheckpointError:  # another program's
        return False


def _foreign(path: Path) -> str | None:
    if path.is_symlink() or not path.is_dir():
        return "it is no folder"
    run = RunFolder.around(path)
    if run is not None and path.absolute().relative_to(run.path.absolute()).parts[:1] in ((), ("model",), ("checkpoints",)):
        return f"it belongs to the run {run.path}"
    try:
        unlisted = unlisted_files(path, listed_files(path) if (path / MANIFEST).exists() else ())
    except CheckpointError as error:
        return f"its {MANIFEST} cannot be read ({error})"
    return f"{unlisted[0]} is in it, which lm did not write" if unlisted else None
