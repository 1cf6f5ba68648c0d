"""What `format` in a checkpoint's meta.json and in a model folder's config.json counts, and how each format becomes the next one."""

from collections.abc import Callable
from pathlib import Path

from lm.config import Tree
from lm.errors import CheckpointError


def current(tree: Tree, where: Path) -> Tree:
    """The tree as this version would have written it; CheckpointError for a format that it does not know.

    tree: with `model`, the config of a model, and in a checkpoint `config`, that of the run.
    """
    found = tree.get("format")
    if type(found) is not int or not 1 <= found <= FORMAT:
        rule = f"this version reads formats 1 to {FORMAT}"
        raise CheckpointError(f"{where}: the format is {found!r}, but {rule}. Use the version of slotlm that wrote it, or a newer one.")
    for migrate in _MIGRATIONS[found - 1 :]:
        tree = migrate(tree)
    return {**tree, "format": FORMAT}


# Migrations are never edited once a version that writes their result is out, and they import nothing that may change.


def _from_1(tree: Tree) -> Tree:
    """Options of the embedding and of the head got sections of their own."""
    new = dict(tree)
    model = tree.get("model")
    if isinstance(model, dict) and model.keys() >= {"tied_head", "head_softcap", "embed_scale"}:
        new["model"] = {key: value for key, value in model.items() if key not in ("tied_head", "head_softcap", "embed_scale")}
        new["model"]["head"] = {"tied": model["tied_head"], "softcap": model["head_softcap"]}
        new["model"]["embed"] = {"scale": model["embed_scale"]}
    if isinstance(tree.get("config"), dict):
        new["config"] = _from_1(tree["config"])
    return new


_MIGRATIONS: list[Callable[[Tree], Tree]] = [_from_1]  # the n-th makes format n + 1 out of format n
FORMAT = len(_MIGRATIONS) + 1
