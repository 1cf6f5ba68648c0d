"""What `format` in a checkpoint's meta.json and in a model folder's config.json counts: it goes up when what they mean changes."""

from pathlib import Path

from lm import plugins
from lm.errors import CheckpointError
from lm.schema import Tree

FORMAT = 3


def current(tree: Tree, where: Path) -> Tree:
    """Returns the tree, which is of today's format; CheckpointError for another one, ConfigError where it needs a plugin."""
    found = tree.get("format")
    if type(found) is not int or found != FORMAT:
        rule = f"this version reads format {FORMAT}"
        raise CheckpointError(f"{where}: the format is {found!r}, but {rule}. Use the version of slotlm that wrote it.")
    if not isinstance(tree.get("model", {}), dict):
        raise CheckpointError(f"{where}: the file is damaged: its model is no object. Use another folder.")
    plugins.require(tree, where)
    return tree
