"""What older versions wrote, out of what this one writes."""

from lm.config import Tree

NEWER = ("launch", "numerics", "check")  # sections of a run's config that format 1 began without


def as_format_1(tree: Tree) -> Tree:
    """A checkpoint's meta.json, or a model folder's config.json. Only the first of the two has a run's config."""
    old = {**tree, "format": 1}
    if "model" in tree:
        old["model"] = _model(tree["model"])
    if "config" in tree:
        kept = {key: value for key, value in tree["config"].items() if key not in NEWER}
        old["config"] = {**kept, "model": _model(kept["model"])}
    return old


def _model(new: Tree) -> Tree:
    """Without the options of embedding and head that came later."""
    old = {key: value for key, value in new.items() if key not in ("head", "embed")}
    return old | {"tied_head": new["head"]["tied"], "head_softcap": new["head"]["softcap"], "embed_scale": new["embed"]["scale"]}
