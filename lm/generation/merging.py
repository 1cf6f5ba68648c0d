"""One model out of several of one architecture, weight by weight: what `lm merge` and `lm average` do."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lm.data.tokenizer.fitting import grown, new_ids
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import ConfigError
from lm.generation.growing import grown_weights
from lm.nn.model_config import model_config
from lm.schema import Tree, flatten
from lm.storage.adapted import read_merged
from lm.storage.checkpoint import checkpoints
from lm.storage.model_folder import IMPORTED, read_config, resolve_model, save_model
from lm.storage.out import require_free
from lm.storage.run_folder import RunFolder, nearest_run
from lm.units import counted

Method = Literal["linear", "slerp", "ties"]
Weights = dict[str, Tensor]
_ALONG = 1e-4  # sine of an angle, below which two directions are taken for one


def merge(
    models: Sequence[str | Path],
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    method: Method = "linear",
    base: str | Path | None = None,
    density: float | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a model folder that is a mean of these models, and returns it.

    models: run, model or checkpoint folders, two or more; an adapter is merged into its parent first, and may be the only one. weights: one
    of each model, divided by their sum; None: equal ones. method: `linear`, `slerp` of two models, or `ties` of any number that were all
    trained from `base`, with special tokens added or not. density: the part of each model's changes to `base` that `ties` keeps; None: 0.2.
    Raises ConfigError for models of different architecture, shapes or tokenizers, and for options that do not go with the method.
    """
    target = require_free(out, overwrite, *models, *([base] if base is not None else []))
    folders = [resolve_model(str(model)) for model in models]
    enough = 1 if folders and read_config(folders[0]).get("adapter") else 2
    shares = _shares(len(models), enough, weights, method, base, density)
    density = 0.2 if density is None else density
    start = None if base is None else resolve_model(str(base))
    tokenizer = load_tokenizer(folders[0])
    read = [read_merged(folder) for folder in folders]
    others = [(folder, *each, load_tokenizer(folder).hash) for folder, each in zip(folders[1:], read[1:], strict=True)]
    if start is not None:
        others.append((start, *_of_base(start, tokenizer)))
    for folder, tree, own, its_hash in others:
        _require_same(folders[0], *read[0], folder, tree, own)
        if its_hash != tokenizer.hash:
            raise ConfigError(f"{folder}: its tokenizer is not that of {folders[0]}, so their ids mean other texts. Leave it out.")
    before = None if start is None else others[-1][2]
    found = _merged([own for _, own in read], shares, method, before, density)
    tree = read[0][0]
    told: Tree = {"models": [str(model) for model in models], "weights": shares, "method": method}
    told |= {"base": str(base), "density": density} if base is not None else {}
    imported = {key: tree[key] for key in IMPORTED if tree.get(key) is not None and all(of.get(key) == tree[key] for of, _ in read)}
    extra = {"merged": told, **imported, "tokenizer_hash": tokenizer.hash, "plugins": tree.get("plugins") or {}}
    dtyped = {name: weight.to(read[0][1][name].dtype) for name, weight in found.items()}
    save_model(target, tree["model"], dtyped, tokenizer.save, extra, overwrite)
    return target


def average(run: str | Path, out: str | Path, *, last: int | None = None, overwrite: bool = False) -> Path:
    """Writes the mean of a run's newest checkpoints, and returns the folder. Raises ConfigError where there are fewer, or fewer than two.

    last: how many. None: all that the run keeps."""
    folder = RunFolder(Path(os.path.expanduser(run)))
    if not folder.exists():
        raise ConfigError(f"{run}: a run folder is needed, with its checkpoints. {nearest_run(folder.path)}")
    kept = checkpoints(folder.checkpoints)
    if len(kept) < (last or 2):
        remedy = f"Write last={len(kept)}, or train" if len(kept) > 1 else "Train"
        wanted = "a mean is of two at least" if last is None else f"last={last} are to be averaged"
        raise ConfigError(f"{run}: it has {counted(len(kept), 'checkpoint')}, and {wanted}. {remedy} with a higher checkpoint.keep_last.")
    return merge(kept[:last], out, overwrite=overwrite)


def linear(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """sum of share * tensor.  Wortsman et al. 2022, arXiv:2203.05482."""
    return torch.stack([share * tensor for share, tensor in zip(shares, tensors, strict=True)]).sum(0)


def slerp(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """sin((1-t) w) / sin w * a + sin(t w) / sin w * b, where w is the angle between two tensors as vectors, and t the second one's share.
    Shoemake 1985, section 3.3; along one line it is `linear`."""
    a, b = tensors
    lengths = a.norm() * b.norm()
    cosine = ((a * b).sum() / lengths).clamp(-1, 1) if lengths > 0 else torch.ones(())
    angle = torch.arccos(cosine)
    if torch.sin(angle) < _ALONG:
        return linear(tensors, shares)
    return (torch.sin(shares[0] * angle) * a + torch.sin(shares[1] * angle) * b) / torch.sin(angle)


def ties(changes: Sequence[Tensor], shares: Sequence[float], density: float) -> Tensor:
    """Returns, element by element, the mean of the changes that have the sign of their sum; of each change only the largest part,
    `density`, counts.

    changes: of a whole model each.  Yadav et al. 2023, arXiv:2306.01708, algorithm 1, with shares as the factors of a mean.
    """
    kept = torch.stack([_largest(change, density) for change in changes])
    share = kept.new_tensor(shares).view(-1, *[1] * changes[0].ndim)
    agrees = kept.sign() == (share * kept).sum(0).sign()
    return (share * kept * agrees).sum(0) / (share * agrees).sum(0).clamp_min(torch.finfo(kept.dtype).tiny)


def _largest(change: Tensor, density: float) -> Tensor:
    n = max(1, round(density * change.numel()))
    least = change.abs().flatten().kthvalue(change.numel() - n + 1).values
    return change.where(change.abs() >= least, change.new_zeros(()))


def _of_base(folder: Path, tokenizer: Tokenizer) -> tuple[Tree, Weights, str]:
    """Returns config, weights and tokenizer's hash of the model that those of `tokenizer` were trained from; where these have added special
    tokens, with the rows that they began as, and the hash with these."""
    (tree, own), before = read_merged(folder), load_tokenizer(folder)
    now = grown(before, [tokenizer.special_names[i] for i in new_ids(before, tokenizer)])
    if now is before or now.hash != tokenizer.hash:
        return tree, own, before.hash
    own = grown_weights(own, before, now)
    return tree | {"model": tree["model"] | {"vocab_size": len(own["embed.weight"])}}, own, now.hash


def _merged(models: Sequence[Weights], shares: Sequence[float], method: Method, base: Weights | None, density: float) -> Weights:
    """Returns the merged weights in float32."""
    names = [*models[0]]
    if base is None:
        mean: Callable[[Sequence[Tensor], Sequence[float]], Tensor] = linear if method == "linear" else slerp
        return {name: mean([own[name].float() for own in models], shares) for name in names}
    start = torch.cat([base[name].float().flatten() for name in names])
    changes = [torch.cat([own[name].float().flatten() for name in names]) - start for own in models]
    sizes = [models[0][name].numel() for name in names]
    parts = (start + ties(changes, shares, density)).split(sizes)
    return {name: part.view(models[0][name].shape) for name, part in zip(names, parts, strict=True)}


def _shares(n: int, enough: int, weights: Sequence[float] | None, method: Method, base: object, density: float | None) -> list[float]:
    """Returns the weights divided by their sum. Raises ConfigError for options that do not go with the method."""
    if n < enough:
        rule = "a mean is of at least two, unless an adapter is merged into its model"
        raise ConfigError(
            f"merge: {counted(n, 'model')} {'was' if n == 1 else 'were'} given, and {rule}. Name them, as in lm merge runs/a runs/b."
        )
    if method == "slerp" and n != 2:
        raise ConfigError(f"method=slerp: it goes from one model to another, and {n} were given. Name two, or use method=linear.")
    if (method == "ties") != (base is not None):
        remedy = "Name that in base=" if base is None else "Leave base= out, or use method=ties"
        raise ConfigError(f"method={method}: base={base}, and ties, as nothing else, merges what the models have changed of one. {remedy}.")
    if density is not None and method != "ties":
        raise ConfigError(f"density={density}: method={method} keeps all of each model. Leave it out, or use method=ties.")
    if density is not None and not 0 < density <= 1:
        raise ConfigError(f"density={density}: it is a part of what was changed. Choose one above 0, and at most 1.")
    given = [1.0] * n if weights is None else [*weights]
    if len(given) != n or min(given) < 0 or not 0 < sum(given) < float("inf"):
        raise ConfigError(f"weights={given}: one for each of {n} models is needed, none below 0 and one above. Write weights=0.5,0.5.")
    return [weight / sum(given) for weight in given]


def _require_same(first: Path, tree: Tree, weights: Weights, other: Path, its_tree: Tree, its_weights: Weights) -> None:
    """Raises ConfigError naming the first config key or weight that differs; only dropout rates and noise may."""
    mine, its = (_keys(config["model"], folder) for config, folder in ((tree, first), (its_tree, other)))
    for key in sorted(mine.keys() | its.keys(), key=lambda key: (not key.endswith("kind"), key)):  # their options follow from kinds
        if mine.get(key) != its.get(key):
            said = f"model.{key} is {its.get(key)}, and {mine.get(key)} in {first}"
            raise ConfigError(f"{other}: {said}; models of one architecture are merged. Leave one of them out.")
    shapes = [{name: tuple(weight.shape) for name, weight in own.items()} for own in (weights, its_weights)]
    if wrong := [name for name in sorted(shapes[0].keys() | shapes[1].keys()) if shapes[0].get(name) != shapes[1].get(name)]:
        said = f"{wrong[0]} is {shapes[1].get(wrong[0], 'missing')}, and {shapes[0].get(wrong[0], 'missing')} in {first}"
        raise ConfigError(f"{other}: {said}. Leave one of them out.")


def _keys(tree: Tree, folder: Path) -> Tree:
    found = flatten(model_config(tree, f"{folder}: model").tree())
    return {key: value for key, value in found.items() if not key.endswith(("dropout", "noise"))}
