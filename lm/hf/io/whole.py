"""Weights that an adapter trains whole, as peft has them: modules_to_save, and rows of embeddings (trainable_token_indices)."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lm.adapters.adapter import LoRAConfig
from lm.errors import ConfigError
from lm.generation.growing import ROWS
from lm.hf.io.family import Family, Pair, resolved
from lm.hf.io.transforms import Copies, Stack
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import build_model
from lm.schema import Tree

PREFIX = "base_model.model."
_ROWS = ".token_adapter.trainable_tokens_delta"
_LOW_ROWS = ".lora_embedding_"
_EMBED, _HEAD = "embed.weight", "head.weight"
OF_LABELS = ("classifier", "score")
"""Names of a classifier's head: peft's modules_to_save has both of them, and a model one."""


def pairs_of(family: Family, cfg: ModelConfig) -> Iterator[Pair]:
    """Yields the pairs of all weights of the model under the names of transformers' built model, and that of the head where the embedding
    is the head: two modules are built then, of which peft replaces each."""
    names = dict(build_model(cfg, device="meta").named_parameters()).keys()
    for pair in family.built_pairs(resolved(cfg)):
        if pair.ours[0] in names:
            yield pair
        elif pair.ours[0] == _HEAD and cfg.head.tied:
            yield pair._replace(ours=(_EMBED,))


def to_modules(
    family: Family, cfg: ModelConfig, adapter: LoRAConfig, own: Mapping[str, Tensor], weights: Mapping[str, Tensor], adapted: list[str]
) -> dict[str, Tensor]:
    """Returns by peft's keys the tensors of the modules that hold a weight which was trained whole, each module with all of its weights.

    own: the adapter's weights; weights: of the model that it belongs to; adapted: paths of the modules with a low-rank adapter. Raises
    ConfigError for a weight that peft has no place for.
    """
    whole = adapter.whole_of(own)
    pairs = [*pairs_of(family, cfg)] if whole else []
    meant = {_module(path): pair for pair in pairs for path in pair.theirs if not whole.keys().isdisjoint(pair.ours)}
    of_head = (_HEAD, "head.bias")[: 1 + cfg.head.bias]
    head = {_module(pair.theirs[0]) for pair in family.built_pairs(resolved(cfg)) if pair.ours[0] in of_head}
    for path, pair in meant.items():
        copied = isinstance(pair.transform, Copies) and len(pair.theirs) > 1
        if isinstance(pair.transform, Stack) or copied or (cfg.kind == "encoder_decoder" and _EMBED in pair.ours):
            raise _no_place(pair.ours[0], "is no module there, or several")
        if len(head) > 1 and (path in head or (cfg.head.tied and _EMBED in pair.ours)):
            raise _no_place(pair.ours[0], "belongs to a head that is several modules there")
        if path in adapted:
            raise _no_place(pair.ours[0], f"is a part of {path}, which has a low-rank adapter there")
    if _EMBED in whole and cfg.head.tied and sum(_EMBED in pair.ours for pair in pairs) < 2:
        raise _no_place(_EMBED, "is the head as well, which has no name of its own there")
    found: dict[str, Tensor] = {}
    for pair in pairs:
        if any(_module(path) in meant for path in pair.theirs):
            theirs = pair.transform.to_theirs([whole.get(name, weights[name]) for name in pair.ours])
            named = zip(pair.theirs, theirs, strict=True)
            found |= {PREFIX + path: tensor.clone().contiguous() for path, tensor in named if _module(path) in meant}
    return found


def from_modules(
    folder: Path, family: Family, cfg: ModelConfig, config: Tree, rest: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns by our names the weights that peft has trained whole, or rows of.

    config: adapter_config.json; rest: by peft's keys the tensors that are no low-rank matrices; weights: of the model. Raises ConfigError
    for a tensor that is no weight of the model's, and for an embedding that was trained apart from the head, which it is in the base.
    """
    rows = {key.removeprefix(PREFIX).removesuffix(_ROWS) + ".weight": tensor for key, tensor in rest.items() if key.endswith(_ROWS)}
    whole = {key.removeprefix(PREFIX): tensor for key, tensor in rest.items() if not key.endswith(_ROWS)}
    if low := next((key.removeprefix(PREFIX).partition(_LOW_ROWS)[0] for key in rest if _LOW_ROWS in key), None):
        raise ConfigError(f"{folder}: it adapts {low}, and lm's adapters have no form for embeddings. Merge it with peft.")
    pairs = [*pairs_of(family, cfg)] if rest else []
    if unknown := (rows.keys() | whole.keys()) - {path for pair in pairs for path in pair.theirs}:
        headless = cfg.head.labels is None and any(_in_module(path, name) for path in unknown for name in OF_LABELS)
        made = "AutoModelForSequenceClassification.from_pretrained(..., num_labels=...), save that, and import it"
        remedy = f"It tells texts apart, and the base predicts tokens: make a base by {made}" if headless else "Give the base that it is of"
        raise ConfigError(f"{folder}: it has trained {min(unknown)}, which is no weight of the base. {remedy}.")
    named = [name for name in config.get("modules_to_save") or () if name not in OF_LABELS or _has(family, cfg, name)]
    if missing := [name for name in named if not any(_in_module(path, name) for path in whole)]:
        raise ConfigError(f"{folder}: modules_to_save names {missing[0]}, and no tensor is of that. Restore the file.")
    found: dict[str, Tensor] = {}
    apart = [pair for pair in pairs if pair.ours == (_EMBED,) and whole.keys().isdisjoint(pair.theirs)]
    for pair in (pair for pair in pairs if not (rows.keys() | whole.keys()).isdisjoint(pair.theirs)):
        before = zip(pair.theirs, pair.transform.to_theirs([weights[name] for name in pair.ours]), strict=True)
        theirs = [_in_rows(folder, config, path, old, rows[path]) if path in rows else whole.get(path, old) for path, old in before]
        ours = dict(zip(pair.ours, pair.transform.to_ours(theirs), strict=True))
        if _EMBED in ours and whole and cfg.head.tied and (apart or not torch.equal(ours[_EMBED], found.get(_EMBED, ours[_EMBED]))):
            raise ConfigError(f"{folder}: it has trained embedding and head apart, which are one matrix in the base. Merge it with peft.")
        found |= ours
    of_tokens = [name for name in ROWS if name in weights and (cfg.head.labels is None or not name.startswith("head."))]
    n_rows = {name: len(found.get(name, weights[name])) for name in of_tokens}
    if len(set(n_rows.values())) > 1:
        told = " and ".join(f"{n} rows of {name}" for name, n in n_rows.items())
        raise ConfigError(f"{folder}: with the base it has {told}, and all should be one number. Merge it with peft.")
    return found


def with_rows_of(cfg: ModelConfig, own: Mapping[str, Tensor]) -> ModelConfig:
    """Returns the config with a vocabulary of as many rows as the adapter's embedding has, where it has trained one."""
    return cfg.replace(vocab_size=len(own[_EMBED])) if _EMBED in own else cfg


def _has(family: Family, cfg: ModelConfig, name: str) -> bool:
    """Returns whether the model that transformers builds has weights in a module whose path ends so."""
    return any(_in_module(path, name) for pair in pairs_of(family, cfg) for path in pair.theirs)


def _in_module(path: str, name: str) -> bool:
    """Returns whether a weight is in a module whose path ends so, or in one within that: RoBERTa's classifier is two."""
    parts = path.split(".")
    return any(".".join(parts[:n]).endswith(name) for n in range(1, len(parts)))


def _in_rows(folder: Path, config: Tree, path: str, old: Tensor, rows: Tensor) -> Tensor:
    """Returns a matrix with the rows in their places that trainable_token_indices names."""
    named = config.get("trainable_token_indices")
    by_name = named if isinstance(named, dict) else {"": named}
    places = next((found for name, found in by_name.items() if _module(path).endswith(name)), None)
    if (
        not isinstance(places, list)
        or len(places) != len(rows)
        or old.shape[1:] != rows.shape[1:]
        or not all(0 <= i < len(old) for i in places)
    ):
        raise ConfigError(f"{folder}: trainable_token_indices are not {len(rows)} rows of {path} of the base. Give the base that it is of.")
    new = old.clone()
    new[places] = rows.to(old.dtype)
    return new


def _module(path: str) -> str:
    return path.rpartition(".")[0]


def _no_place(name: str, why: str) -> ConfigError:
    return ConfigError(f"format=peft: {name} was trained whole, and it {why}. Use format=hf, which merges it into the model.")
