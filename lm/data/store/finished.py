"""The end of a preparation: index.json, and the pass over all tokens for what training and validation share."""

from pathlib import Path

from lm.data.store.contamination import contamination
from lm.data.store.shards import TokenStore, read_index, write_index
from lm.data.store.tokenise import remove_state
from lm.errors import ConfigError
from lm.schema import Tree
from lm.storage.atomic import sync


def finish_tokens(folder: Path, index: Tree, whole: bool = True) -> None:
    """Writes index.json; for a whole source with the contamination between its splits."""
    for file in folder.iterdir():
        sync(file)  # else, after a power cut, the index may tell of what is not on the disk
    write_index(folder, index)
    remove_state(folder)
    if whole:
        found = contamination(TokenStore(folder, "train"), TokenStore(folder, "val"))
        write_index(folder, {**index, "contamination": found._asdict()})


def complete_tokens(folder: Path) -> Tree | None:
    """Returns the index of a folder with all tokens, as a process killed in `finish_tokens` leaves it; None where some are missing."""
    try:
        index = read_index(folder)
    except ConfigError:
        return None
    return None if "contamination" in index else index  # with it, it is that of a copy whose files may be missing
