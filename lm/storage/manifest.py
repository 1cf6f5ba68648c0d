"""What is in a folder that was written whole: the SHA-256 of each of its files, in a file beside them."""

import hashlib
import os
import re
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path

from lm.errors import CheckpointError
from lm.storage.reading import read_json

MANIFEST = "manifest.json"
_AT_ONCE = 8  # files to hash
_OF_SYSTEMS = re.compile(r"\.DS_Store|\._.*|\.nfs[0-9a-f]+|\.fuse_hidden[0-9a-f]+|Thumbs\.db|desktop\.ini")
"""Names of files that macOS, Windows, NFS and FUSE leave in folders by themselves."""


def verify(folder: Path) -> None:
    """Raises CheckpointError naming the first file that the manifest does not list, or that is missing or not as it was listed."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder. Check the path.")
    listed = listed_files(folder)
    if unlisted := unlisted_files(folder, listed):
        raise CheckpointError(f"{folder / unlisted[0]}: {MANIFEST} does not list the file, so lm did not write it. Move it elsewhere.")
    _verify_files(folder, listed)


def verify_file(folder: Path, name: str) -> None:
    """As `verify`, for one file alone."""
    _verify_files(folder, {name: listed_files(folder).get(name)})


def _verify_files(folder: Path, listed: Mapping[str, str | None]) -> None:
    remedy = "Use another checkpoint, or restore this one from a copy."
    if missing := [name for name in listed if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder / missing[0]}: the file is missing, but {MANIFEST} lists it. {remedy}")
    with hashes(folder, listed) as found:
        for (name, digest), here in zip(listed.items(), found, strict=True):
            if here != digest:
                raise CheckpointError(f"{folder / name}: the file is damaged: its SHA-256 is not the one in {MANIFEST}. {remedy}")


def listed_files(folder: Path) -> dict[str, str]:
    """Returns the manifest: SHA-256 by file name, relative to the folder. Raises CheckpointError where it is no such list."""
    listed = read_json(folder / MANIFEST)
    for name, digest in listed.items():
        if not isinstance(digest, str) or not name.isprintable() or name != os.path.normpath(name) or name.startswith(("/", "..")):
            raise CheckpointError(f"{folder / MANIFEST}: the file is damaged: it lists {name!r} as {digest!r}. Use another folder.")
    return listed


def unlisted_files(folder: Path, listed: Container[str]) -> list[str]:
    """Returns the names of files in a folder that are neither its manifest nor listed there, nor a system's own."""
    names = [(parent, name) for parent, _, files in os.walk(folder) for name in files if not _OF_SYSTEMS.fullmatch(name)]
    found = (Path(parent, name).relative_to(folder).as_posix() for parent, name in names)
    return sorted(name for name in found if name not in listed and name != MANIFEST)


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def hashes(folder: Path, names: Collection[str]) -> Iterator[Iterator[str]]:
    """Yields an iterator over the files' SHA-256. Several are read at once: one core hashes more slowly than a disk reads. An error in the
    block, such as Ctrl-C, does not wait for them; and a thread that saves while the program ends may still start them."""
    with ThreadPool(min(len(names), _AT_ONCE) or 1) as pool:
        yield pool.imap(lambda name: sha256_of(folder / name), names)
