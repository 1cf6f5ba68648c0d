"""The number of the format of a checkpoint's meta.json and a model folder's config.json, which goes up when their meaning changes; and
today's names of the keys of saved configs, and hashes of their plugins."""

from pathlib import Path

from lm import plugins
from lm.errors import CheckpointError
from lm.schema import Tree

FORMAT = 3


def current(tree: Tree, where: Path) -> Tree:
    """Returns the tree with today's keys. Raises CheckpointError where it is not of today's format, ConfigError where it needs a plugin."""
    found = tree.get("format")
    if type(found) is not int or found != FORMAT:
        rule = f"this version reads format {FORMAT}"
        raise CheckpointError(f"{where}: the format is {found!r}, but {rule}. Use the version of slotlm that wrote it.")
    if not isinstance(tree.get("model", {}), dict):
        raise CheckpointError(f"{where}: the file is damaged: its model is no object. Use another folder.")
    plugins.require(tree, where)
    return with_todays_keys(tree)


def with_todays_keys(saved: Tree) -> Tree:
    """Returns a run's config, or a tree that contains such configs, with today's keys: trainer.recompute was trainer.checkpoint_blocks. The
    hashes of plugins once were of comments and blank lines too."""
    tree = {key: with_todays_keys(value) if isinstance(value, dict) else value for key, value in saved.items()}
    if isinstance(named := tree.get("plugins"), dict):
        tree["plugins"] = plugins.with_todays_hashes(named)
    trainer = tree.get("trainer")
    if isinstance(trainer, dict) and "checkpoint_blocks" in trainer:
        every = trainer.pop("checkpoint_blocks")
        trainer |= {"recompute": "none", "recompute_every": 1} if every is None else {"recompute": "block", "recompute_every": every}
    return tree
