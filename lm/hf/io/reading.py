"""From a Hugging Face folder to a config and weights of ours. Only JSON and safetensors are read, and no code."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lm.errors import CheckpointError, ConfigError
from lm.hf.io.classifier import known_task
from lm.hf.io.family import Family, Pair, families, resolved
from lm.hf.io.files import Files
from lm.hf.io.packed import PackedFiles, Packing, packing_of
from lm.hf.io.unread import refusal
from lm.hf.io.within import TextFiles, text_of, thinker_of
from lm.hf.options.context import changes_at, shortened, stretched_beyond
from lm.hf.options.keys import unheard
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import DecoderConfig, build_model
from lm.schema import Tree
from lm.storage.reading import read_json
from lm.units import counted

CONFIG = "config.json"
_WRAPPERS = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile", "base_model.model.": "peft"}
"""Prefixes of names, and what puts them there."""


@dataclass(frozen=True)
class Imported:
    """A model read from a Hugging Face folder.  notes: what was left out or is different here, for the user."""

    config: ModelConfig
    weights: dict[str, Tensor]
    family: Family
    notes: list[str]


def read_hf(folder: Path, max_seq_len: int | None = None) -> Imported:
    """Returns config and weights of a model in a Hugging Face folder. Raises ConfigError for a config that no family of ours can hold,
    CheckpointError for files that do not fit the config.  max_seq_len: a shorter context; None: the model's own."""
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"{folder}: {CONFIG} is missing{_beside(folder)}.")
    whole = thinker_of(read_json(folder / CONFIG, foreign=True))
    text = text_of(whole, families())
    hf = whole if text is None else text
    family = _family(folder, hf)
    packing = packing_of(packed, str(folder / CONFIG)) if (packed := hf.pop("quantization_config", None)) else None
    for key, other in family.renamed.items():
        if key in hf and other in hf and hf[key] != hf[other]:
            what = f"{key}={hf[key]!r} and {other}={hf[other]!r} are two names of one option"
            raise ConfigError(f"{folder}: config.json: {what}. Restore the file.")
    hf = {family.renamed.get(key, key): value for key, value in hf.items()}
    for key in ("rope_parameters", "rope_scaling"):  # which families take apart before they read them
        if not isinstance(hf.get(key), dict | None):
            raise ConfigError(f"{folder}: config.json: a value does not fit {family.name} ({key}={hf[key]!r}). Restore the file.")
    within = None if text is None else TextFiles(_files(folder, packing), whole.get("text_config", {}))
    hf = hf if within is None else within.tied(hf)
    try:
        cfg = family.config(hf)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {_uneven(hf) or error}") from None
    if cfg.vocab_size is None or cfg.max_seq_len is None:
        raise ConfigError(f"{folder / CONFIG}: vocab_size or the longest row is null, and weights have numbers. Restore the file.")
    notes = unheard(str(folder / CONFIG), hf, family, cfg)
    if packing is not None:
        notes.append(
            f"{CONFIG}: quantization_config: matrices of {packed.get('quant_method')} are bf16 from here on, and what they multiply is too"
        )
    if hf.get("auto_map"):
        notes.append(f"{CONFIG}: auto_map names code of the model's own, which is not run")
    files = within or _files(folder, packing)
    if within is not None:
        notes += within.notes(whole, cfg.head)
    _require_unwrapped(folder, files.names)
    if (tie := _ties_no_head(family, cfg, _architecture(hf), files.names)) is not None:
        hf |= {tie: True}
        notes.append(f"{CONFIG}: {_architecture(hf)} has no head, and the embedding takes its place: lm embed makes vectors by it")
    cfg, ignored = family.config(family.as_stored(hf, files.names)), family.ignores(hf)
    try:
        weights = _weights(folder, files, family, cfg, ignored, _architecture(hf))
    except CheckpointError as error:
        if not isinstance(cfg, DecoderConfig) or cfg.mtp is None:
            raise
        notes.append(f"{CONFIG}: left out: {counted(cfg.mtp.depth, 'layer')} for further tokens: {error}")
        cfg = cfg.replace(mtp=None)
        weights = _weights(folder, files, family, cfg, ignored, _architecture(hf))
    if max_seq_len is not None:
        cfg = shortened(cfg, max_seq_len)
    if (original := changes_at(cfg)) is not None:
        notes.append(
            f"{CONFIG}: for rows of up to {original} tokens transformers has other rotary factors, and this model has those of longer rows"
            f" for all: expect other logits there, or import with max_seq_len={original}"
        )
    if (longest := stretched_beyond(cfg)) is not None:
        notes.append(
            f"{CONFIG}: beyond {longest} tokens transformers stretches each row by its own length (dynamic NTK), and this model none:"
            " expect other logits there, or train on with a longer model.max_seq_len"
        )
    return Imported(cfg, weights, family, notes)


def _family(folder: Path, hf: Tree) -> Family:
    known = known_task(hf)
    kind = str(hf.get("model_type"))
    if kind not in known:
        raise ConfigError(f"{folder / CONFIG}: {refusal(hf, known)}")
    return known[kind]


def _uneven(hf: Tree) -> str | None:
    """Returns what is wrong where a config.json tells of another number of layers than it has."""
    n, types = hf.get("num_hidden_layers"), hf.get("layer_types")
    if not isinstance(types, list) or type(n) is not int or len(types) == n:
        return None
    return f"{CONFIG}: num_hidden_layers={n}, and layer_types tells of {counted(len(types), 'layer')}. Restore the file."


def _files(folder: Path, packing: Packing | None) -> Files:
    return Files(folder) if packing is None else PackedFiles(folder, packing)


def _beside(folder: Path) -> str:
    """Returns what a folder without config.json holds that is, or could be, a model, and the remedy."""
    saved = [one for one in folder.glob("checkpoint-*") if one.name.rpartition("-")[2].isdecimal() and (one / CONFIG).is_file()]
    if saved:
        newest = max(saved, key=lambda one: int(one.name.rpartition("-")[2]))
        return f"; it holds {counted(len(saved), 'checkpoint')} of a training. Name one of them: {newest}"
    if file := next(folder.glob("*.gguf"), None):
        return f"; {file.name} is of llama.cpp, and lm reads safetensors. Name the model that it was made of"
    return ", so this is no model in the format of Hugging Face. Use another folder"


def _require_unwrapped(folder: Path, names: Collection[str]) -> None:
    """Raises CheckpointError where all tensors have the prefix of a wrapper around the model."""
    if prefix := next((one for one in _WRAPPERS if names and all(name.startswith(one) for name in names)), None):
        raise CheckpointError(
            f"{folder}: the names of all tensors begin with {prefix!r}, which {_WRAPPERS[prefix]} puts there. Save the model inside of it."
        )


def _architecture(hf: Tree) -> str | None:
    """Returns the class that config.json names."""
    named = hf.get("architectures")
    return str(named[0])[:80] if isinstance(named, list) and named else None


def _weights(
    folder: Path, files: Files | TextFiles, family: Family, cfg: ModelConfig, ignored: tuple[str, ...], architecture: str | None
) -> dict[str, Tensor]:
    """Returns every tensor of the model, checked by name and shape, all in the dtype that most numbers have; but `self_updated` ones (the
    correction bias of a router, float32 beside bf16 matrices) stay as they are.  architecture: the class in config.json."""
    model = build_model(cfg, device="meta")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    spelled = _spelled(family, files.names)
    stored = [pair.renamed(spelled) for pair in family.pairs(resolved(cfg))]
    named = [pair for pair in stored if pair.ours[0] in shapes and not _left_out(family, pair, files.names)]
    missing = [key for pair in named for key in pair.theirs if key not in files.names]
    used = {key for pair in named for key in pair.theirs} | _tied_copy(folder, stored, shapes.keys(), files)
    used |= _constants(folder, {spelled(key): tensor for key, tensor in family.constants(resolved(cfg)).items()}, files)
    unnamed = sorted(shapes.keys() - {name for pair in stored for name in pair.ours})
    if unnamed:
        raise CheckpointError(f"{folder}: {_listed('not read', unnamed)}{family.name} does not say where they are. Report it.")
    extra = [key for key in files.names if key not in used and not any(re.fullmatch(pattern, key) for pattern in ignored)]
    if missing or extra:
        known = architecture in (None, family.architecture)
        other = "another model" if known else f"{architecture}, and lm reads {family.architecture}"
        remedy = "Use the config.json that belongs to the weights" if known else "Import another model"
        raise CheckpointError(f"{folder}: {_listed('missing', missing)}{_listed('not known', extra)}the config names {other}. {remedy}.")
    zeros = {name for pair in stored if _left_out(family, pair, files.names) for name in pair.ours}
    weights = {name: torch.zeros(shape) for name, shape in shapes.items() if name in zeros}
    for pair in named:
        weights |= _transformed(folder, files, pair, shapes)
    numbers, self_updated = Counter[torch.dtype](), model.self_updated()
    for tensor in weights.values():
        numbers[tensor.dtype] += tensor.numel()
    dtype = numbers.most_common(1)[0][0]
    return {name: tensor if name in self_updated else tensor.to(dtype) for name, tensor in weights.items()}


def _transformed(folder: Path, files: Files | TextFiles, pair: Pair, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Returns our tensors of a pair by name. Raises CheckpointError where those of the file do not have the shapes that give ours."""
    theirs, keys = [files.read(key) for key in pair.theirs], ", ".join(pair.theirs[:3])
    try:
        found = pair.transform.to_ours(theirs)
    except (RuntimeError, IndexError, ValueError) as error:
        raise CheckpointError(f"{folder}: {keys} of shape {tuple(theirs[0].shape)} does not fit ({error}).") from None
    for name, tensor in zip(pair.ours, found, strict=True):
        if tensor.shape != shapes[name]:
            raise CheckpointError(
                f"{folder}: {keys} gives {name} the shape {tuple(tensor.shape)}, and the config asks for {tuple(shapes[name])}."
                " Use the config.json that belongs to the weights."
            )
    return {name: tensor.contiguous() for name, tensor in zip(pair.ours, found, strict=True)}


def _ties_no_head(family: Family, cfg: ModelConfig, architecture: str | None, names: set[str]) -> str | None:
    """Returns the key of config.json that ties the head of a decoder which was saved without one; None where it has one, or needs none."""
    key = family.fields.get("head.tied")
    if key is None or cfg.head.tied or not (architecture or "").endswith("Model"):
        return None
    spelled, heads = _spelled(family, names), [pair for pair in family.pairs(resolved(cfg)) if pair.ours == ("head.weight",)]
    there = any(spelled(name) in names for pair in heads for name in pair.theirs)
    return None if there else key if isinstance(key, str) else key[0]


def _spelled(family: Family, names: set[str]) -> Callable[[str], str]:
    """Returns a function: the key that the file has for a key. Models saved without their head have no prefix, those with another one
    have one, and older files other endings."""
    bare = bool(family.prefix) and not any(name.startswith(family.prefix) for name in names)

    def spelled(key: str) -> str:
        key = key.removeprefix(family.prefix) if bare else key
        older = [key.removesuffix(ending) + old for ending, old in family.older_endings.items() if key.endswith(ending)]
        return next((other for other in (*older, family.beneath + key) if key not in names and other in names), key)

    return spelled


def _left_out(family: Family, pair: Pair, names: set[str]) -> bool:
    """Returns whether the file leaves these tensors out because they are zeros."""
    return all(key.endswith(family.zero_if_missing) and key not in names for key in pair.theirs)


def _constants(folder: Path, constants: Mapping[str, Tensor], files: Files | TextFiles) -> set[str]:
    """Returns the keys of those that the file has. Raises CheckpointError where one holds anything else, up to the rounding of bf16."""
    stored = {key: files.read(key).float() for key in constants if key in files.names}
    for key, tensor in stored.items():
        if tensor.shape != constants[key].shape or not torch.allclose(tensor, constants[key], rtol=0.0, atol=2**-8):
            raise CheckpointError(f"{folder}: {key} is not the constant that it is in this family, and lm has no weights there.")
    return set(stored)


def _tied_copy(folder: Path, stored: list[Pair], ours: Collection[str], files: Files | TextFiles) -> set[str]:
    """Returns the key of a head that the file stores although the model's is tied to the embedding, or no key. Raises CheckpointError where
    head and embedding differ."""
    keys = {pair.ours[0]: pair.theirs[0] for pair in stored}
    head, embed = keys.get("head.weight"), keys.get("embed.weight")
    if "head.weight" in ours or head not in files.names or embed not in files.names:
        return set()
    if not torch.equal(files.read(head), files.read(embed)):
        raise CheckpointError(
            f"{folder}: {head} differs from {embed}, and config.json says that they are one. Set tie_word_embeddings to false in it."
        )
    return {head}


def _listed(what: str, keys: list[str]) -> str:
    return f"{len(keys)} tensors are {what} ({', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}); " if keys else ""
