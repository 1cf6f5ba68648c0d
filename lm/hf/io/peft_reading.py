"""Reading an adapter of peft.

Where transformers has one matrix for several of ours, each of these gets all of A, and its own rows of B. Where one of ours is several
there, it is the other way round.
"""

import re
from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from lm.adapters.adapter import LoRAConfig
from lm.adapters.lowrank import lengths
from lm.errors import CheckpointError, ConfigError
from lm.hf.io.family import Family, Pair, resolved
from lm.hf.io.peft import CONFIG, WEIGHTS, Low, modules, probes, transposed
from lm.hf.io.transforms import Copies
from lm.hf.io.whole import PREFIX, from_modules, with_rows_of
from lm.hf.io.within import has_root, of_whole, within
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import build_model
from lm.schema import Tree
from lm.storage.checkpoint import require_finite
from lm.storage.reading import read_json, refuse_pointer
from lm.units import counted

_MODULE = re.compile(r"base_model\.model\.(.+)\.lora_(?:([AB])\.weight|magnitude_vector)")
_UNREAD = {
    "bias": "none", "target_parameters": None, "layer_replication": None, "alora_invocation_tokens": None, "lora_bias": False,
    "kasa_config": None,
}  # fmt: skip
_CHANGE_THE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")  # ways to begin, by what init_lora_weights starts with


def read_peft(
    folder: Path, family: Family, cfg: ModelConfig, weights: Mapping[str, Tensor], say: Callable[[str], None]
) -> tuple[LoRAConfig, dict[str, Tensor]]:
    """Returns the config and the weights of a peft adapter of a model of this family, or of a model of several kinds of inputs that it is
    the text model of. Raises ConfigError for an adapter that is no LoRA or DoRA of lm's kind or does not fit the model, CheckpointError for
    files that are damaged.

    weights: of the model."""
    config, tensors = read_json(folder / CONFIG, foreign=True), _stored(folder)
    _require_lora(folder, config)
    if of_whole([key.removeprefix(PREFIX) for key in tensors]):
        config, tensors = _within_alone(config, tensors, say)
    theirs, rest = _parted(folder, tensors)
    theirs = {family.as_built(path): each for path, each in theirs.items()}  # lm wrote names of files once
    whole = from_modules(folder, family, cfg, config, rest, weights)
    rows = {name: p.shape[-2] for name, p in build_model(cfg, device="meta").named_parameters() if p.ndim == 2}
    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    grown: dict[str, Tensor] = {}
    alpha_of, rslora = config.get("alpha_pattern") or {}, config.get("use_rslora")
    built = [*family.built_pairs(resolved(cfg))]
    for pair in modules([pair for pair in built if pair.ours[0] in rows and not isinstance(pair.transform, Copies)]):
        mine = {path: theirs.pop(path) for path in pair.theirs if path in theirs}
        if not mine:
            continue
        if path := next((path for path, each in mine.items() if (each.m is not None) != bool(config.get("use_dora"))), None):
            raise CheckpointError(f"{folder / WEIGHTS}: use_dora and the magnitude of {path} do not fit each other. Restore the file.")
        alphas = {path: _of_pattern(alpha_of, path, float(config["lora_alpha"])) for path in mine}
        scales = {path: alphas[path] / (sqrt(len(each.a)) if rslora else len(each.a)) for path, each in mine.items()}
        scale, times = (next(iter(scales.values())), dict.fromkeys(mine, 1.0)) if len(set(scales.values())) == 1 else (1.0, scales)
        try:
            a, parts, long = _split(pair, rows, mine, times, weights)
            named = zip(pair.ours, long, strict=True) if long else ()
            grown |= {name.removesuffix("weight") + "lora_m": m - lengths(weights[name]) for name, m in named}
        except RuntimeError:
            raise _other_shapes(folder) from None
        found |= {name.removesuffix("weight"): (a, part, scale) for name, part in zip(pair.ours, parts, strict=True)}
    if beside := [path for path in theirs if any(re.fullmatch(pattern, f"{path}.weight") for pattern in family.ignored)]:
        say(f"{WEIGHTS}: left out: {', '.join(beside)[:200]}, which is no part of the model here")
        theirs = {path: each for path, each in theirs.items() if path not in beside}
    if head := next((path for pair in modules(built) if pair.ours == ("head.weight",) for path in pair.theirs if path in theirs), None):
        raise ConfigError(f"{folder}: it adapts {head}, which is the embedding in the base, and has no adapter here. Merge it with peft.")
    if theirs or not found:
        raise ConfigError(
            f"{folder}: it adapts {next(iter(theirs), 'nothing')}, which is no matrix of the base. Give the base that it is of."
        )
    return _ours(folder, config, with_rows_of(cfg, whole), found, grown, whole, weights)


def _split(
    pair: Pair, rows: Mapping[str, int], mine: Mapping[str, Low], times: Mapping[str, float], weights: Mapping[str, Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Returns the A of all our matrices, the B of each, and with DoRA the magnitude of each, (out,).  mine: the adapters by path there, of
    one matrix or of some of those that one of ours is; times: what the B of each is multiplied by."""
    found, turned = [each.a for each in mine.values()], transposed(pair, rows, torch.Size())
    shared = all(torch.equal(found[0], other) for other in found)  # as `_fused` writes it
    a = found[0] if shared else torch.cat(found)
    dora, at = any(each.m is not None for each in mine.values()), 0
    b, m = [], pair.transform.to_theirs([lengths(weights[name]).unsqueeze(1) for name in pair.ours]) if dora else []
    for i, (path, probe) in enumerate(zip(pair.theirs, probes(pair, rows, torch.Size(), len(a)), strict=True)):
        there = a.new_zeros(probe.mT.shape if turned else probe.shape)
        if (each := mine.get(path)) is not None:
            there = pad(each.b * times[path], (at, len(a) - at - len(each.a)))
            at += 0 if shared else len(each.a)
            if each.m is not None:
                m[i] = each.m.unsqueeze(0 if turned else 1)
        b.append(there.mT.contiguous() if turned else there)
    return a, pair.transform.to_ours(b), [each.flatten() for each in pair.transform.to_ours(m)] if dora else []


def _stored(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors by their keys. Raises CheckpointError for a damaged file."""
    refuse_pointer(folder / WEIGHTS)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: cannot be read ({error}). Restore the file.") from None
    for key, tensor in tensors.items():
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise CheckpointError(f"{folder / WEIGHTS}: {key} is {tensor.dtype}, and fp32, fp16 or bf16 is needed. Use another adapter.")
        require_finite(key, tensor, str(folder / WEIGHTS), "Use another adapter")
    return tensors


def _within_alone(config: Tree, tensors: Mapping[str, Tensor], say: Callable[[str], None]) -> tuple[Tree, dict[str, Tensor]]:
    """Returns config and tensors of an adapter of a model of several kinds of inputs as those of one of its text model."""
    rooted = has_root(tensors.keys())
    names = {key: within(key.removeprefix(PREFIX), rooted) for key in tensors}
    if others := [key for key, name in names.items() if name is None]:
        parts = ", ".join(dict.fromkeys(".".join(key.removeprefix(PREFIX).split(".")[:2]) for key in others))
        say(f"{WEIGHTS}: left out: {counted(len(others), 'tensor')} of other inputs ({parts[:200]})")
    saved = [name for name in config.get("modules_to_save") or () if not any(f".{name}." in f".{key}" for key in others)]
    found: Tree = {"modules_to_save": [within(name, rooted) or name for name in saved]}
    for key in ("alpha_pattern", "trainable_token_indices"):
        if isinstance(named := config.get(key), dict):
            found[key] = {within(name, rooted) or name: value for name, value in named.items()}
    return config | found, {PREFIX + name: tensors[key] for key, name in names.items() if name is not None}


def _parted(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Low], dict[str, Tensor]]:
    """Returns the low-rank matrices by the path of their module, and the other tensors by their keys. Raises CheckpointError where two
    matrices do not fit each other."""
    found: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if (match := _MODULE.fullmatch(key)) is not None:
            found.setdefault(match[1], {})[match[2] or "M"] = tensor
        else:
            rest[key] = tensor
    for path in found:
        rest.pop(f"{PREFIX}{path}.base_layer.weight", None)  # of the base, which peft saves too beside an adapter of the head
    for path, each in found.items():
        sizes = {part: tensor.shape for part, tensor in each.items()}
        a, b = sizes.get("A", ()), sizes.get("B", ())
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or sizes.get("M", b[:1]) != b[:1]:
            raise CheckpointError(f"{folder / WEIGHTS}: A and B of {path} do not fit each other. Restore the file.")
    return {path: Low(each["A"], each["B"], each.get("M")) for path, each in found.items()}, rest


def _require_lora(folder: Path, config: Tree) -> None:
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{folder / CONFIG}: peft_type is {config.get('peft_type')!r}, and LORA is read. Merge it with peft.")
    for key, plain in _UNREAD.items():
        if (config.get(key) or plain) != plain:
            raise ConfigError(f"{folder / CONFIG}: {key} is {str(config[key])[:60]}, which has no place here. Merge it with peft.")
    if str(begin := config.get("init_lora_weights")).startswith(_CHANGE_THE_BASE):
        raise ConfigError(f"{folder / CONFIG}: init_lora_weights is {str(begin)!r}, which changes the base as well. Merge it with peft.")
    if regex := next((key for key in config.get("alpha_pattern") or {} if not re.fullmatch(r"[\w.]+", key)), None):
        raise ConfigError(f"{folder / CONFIG}: alpha_pattern has the regex {regex[:60]!r}, and names are read. Merge it with peft.")
    if not isinstance(config.get("lora_alpha"), int | float) or not isinstance(config.get("lora_dropout", 0.0), int | float):
        raise ConfigError(f"{folder / CONFIG}: lora_alpha or lora_dropout is no number. Restore the file.")


def _of_pattern(pattern: Mapping[str, float], path: str, otherwise: float) -> float:
    """Returns the value of the first key that the path ends in, else `otherwise`; as in peft, a dot of the key is any character. Keys that
    are other regexes, which could take forever, were refused by `_require_lora`."""
    return next((float(value) for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", path)), otherwise)


def _ours(
    folder: Path,
    config: Tree,
    cfg: ModelConfig,
    found: Mapping[str, tuple[Tensor, Tensor, float]],
    grown: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> tuple[LoRAConfig, dict[str, Tensor]]:
    """Returns an adapter of one rank and scale, and its weights: where peft's ranks or scales differ, lower ranks are padded with zeros,
    and the scale is multiplied into B. Raises ConfigError for shapes that do not fit the model.

    found: A, B and scale by our names; grown: with DoRA what the magnitudes have grown by; whole: what was trained whole; weights: of the
    model."""
    alike = len({(len(a), scale) for a, _, scale in found.values()}) == 1
    rank = max(len(a) for a, _, _ in found.values())
    scaled: Tree = {"alpha": float(config["lora_alpha"]), "rslora": bool(config.get("use_rslora"))}
    if not alike:
        scaled = {"alpha": float(rank)}
    elif (scale := next(scale for _, _, scale in found.values())) != scaled["alpha"] / (sqrt(rank) if scaled["rslora"] else rank):
        scaled = {"alpha": rank * scale}
    own, others = {**grown, **whole}, {"dora": bool(grown), "whole": sorted(whole), "dropout": float(config.get("lora_dropout", 0.0))}
    for stem, (a, b, scale) in found.items():
        own[f"{stem}lora_a"] = pad(a, (0, 0, 0, rank - len(a))).contiguous()
        own[f"{stem}lora_b"] = pad(b if alike else b * scale, (0, rank - len(a))).contiguous()
    for targets in (None, sorted(stem.removesuffix(".") for stem in found)):
        adapter = LoRAConfig.model_validate({"rank": rank, "targets": targets, **others, **scaled})
        model = build_model(cfg, device="meta")
        try:
            adapter.apply(model)
        except ValueError as error:  # says which target is not one, or is too narrow
            if targets is None:
                continue
            reason, _, _ = str(error).partition(". ")
            raise ConfigError(f"{folder}: it has no form here, since {reason}. Merge it with peft.") from None
        shapes = {name: p.shape for name, p in adapter.own(model).items()}
        full = {name: weights[name] for name in shapes.keys() - own.keys() if name in weights} | own  # a name may mean others too
        if {name: tensor.shape for name, tensor in full.items()} == shapes:
            return adapter, full
    raise _other_shapes(folder)


def _other_shapes(folder: Path) -> ConfigError:
    return ConfigError(f"{folder}: its matrices are not of the shapes that the base has. Give the base that it is of.")
