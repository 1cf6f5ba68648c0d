"""An adapter as peft has it: adapter_config.json, and low-rank matrices under the names of the modules that transformers builds.

Where transformers has one matrix for several of ours, W = [W1; W2], its adapter is [B1 0; 0 B2] [A1; A2], with one scale for all. On
import each of our matrices gets all of A, and its own rows of B. Where one of ours is several there, it is the other way round.
"""

import re
from collections.abc import Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from lm.adapters.adapter import LoRAConfig, adapting
from lm.adapters.lowrank import lengths
from lm.errors import CheckpointError, ConfigError
from lm.hf.io.family import Family, Pair, resolved
from lm.hf.io.transforms import Copies, Halves, Stack
from lm.nn.transformer import ModelConfig, build_model
from lm.schema import Tree
from lm.storage.atomic import write_json
from lm.storage.checkpoint import require_finite
from lm.storage.reading import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TASKS = {"decoder": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM"}


class Low(NamedTuple):
    """The adapter of one matrix: A, (r, in), and B, (out, r); for stacked experts (e, r, in) and (e, out, r). With DoRA the magnitude m,
    (out,)."""

    a: Tensor
    b: Tensor
    m: Tensor | None = None
    transposed: bool = False  # the matrix is stored as (in, out)


def write_peft(
    folder: Path, family: Family, cfg: ModelConfig, adapter: LoRAConfig, own: Mapping[str, Tensor], weights: Mapping[str, Tensor], base: str
) -> None:
    """Writes an adapter as peft loads it.  own: its weights; weights: of the model that it belongs to; base: that model's name in the
    config.  Raises NumericsError for a tensor that is not finite, ConfigError for a matrix to which peft adds no adapter."""
    rows = {name: p.shape[-2] for name, p in build_model(cfg, device="meta").named_parameters() if p.ndim > 1}
    low = {name: Low(a, b) for name, a, b in adapter.low(own) if name in rows}
    for name, each in [(name, each) for name, each in low.items() if each.a.ndim == 3]:
        low |= {f"{name}/{i}": Low(a, b) for i, (a, b) in enumerate(zip(each.a, each.b, strict=True))}
        rows |= dict.fromkeys((f"{name}/{i}" for i in range(len(each.a))), rows[name])
    pairs = [*_modules([pair for pair in family.pairs(resolved(cfg)) if pair.ours[0] in rows])]
    long = {name: adapter.magnitude(name, weights, own).unsqueeze(1) for name in rows if name in weights} if adapter.dora else {}
    found = {path: each for pair in pairs for path, each in _fused(pair, low, rows, long)}
    if path := next((path for path in found if path.endswith(tuple(f".{name}" for name in family.unadapted))), None):
        raise ConfigError(f"format=peft: peft adds no adapter to {path} of a {family.name}. Use format=hf, which merges it into the model.")
    tensors = dict(_tensors(found))
    for name, tensor in tensors.items():
        require_finite(name, tensor, "export", "Use another checkpoint")
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, _config(cfg, adapter, found, [path for pair in pairs for path in pair.theirs], base))


def _modules(pairs: list[Pair]) -> Iterator[Pair]:
    """Yields the pairs under the names of transformers' built model: the paths of modules, and of experts those of parameters. Experts that
    are separate tensors in the file become two parameters of a module below mlp, one of gate and up together and one of down; Switch keeps
    them apart. Where there are such experts, peft takes any module in mlp that is called as a part of them for an expert; so matrices there
    are named by their parameter `weight`."""
    stacks = [pair for pair in pairs if isinstance(pair.transform, Stack) and ".expert_" not in pair.theirs[0]]
    for pair in pairs:
        if pair in stacks:
            path = pair.theirs[0].split(".experts.")[0].rpartition(".")[0] + ".mlp.experts"
            stem, _, name = pair.ours[0].rpartition(".")
            if name == "gate":
                yield Pair((pair.ours[0], f"{stem}.up"), (f"{path}.gate_up_proj",), Halves())
            elif name == "down":
                yield Pair(pair.ours, (f"{path}.down_proj",))
        elif isinstance(pair.transform, Stack):
            yield from (Pair((f"{pair.ours[0]}/{i}",), (path.removesuffix(".weight"),)) for i, path in enumerate(pair.theirs))
        elif stacks and ".mlp." in pair.theirs[0]:
            yield pair
        else:
            yield pair._replace(theirs=tuple(path.removesuffix(".weight") for path in pair.theirs))


def _fused(pair: Pair, low: Mapping[str, Low], rows: Mapping[str, int], long: Mapping[str, Tensor]) -> Iterator[tuple[str, Low]]:
    """Yields by path the adapters of the matrices there, joined from the adapters of our matrices that they consist of; none where none of
    these has one.  long: with DoRA the magnitudes of all our matrices, (out, 1) each."""
    mine = {name: low[name] for name in pair.ours if name in low}
    if not mine:
        return
    a = torch.cat([each.a for each in mine.values()], dim=-2)
    lead, transposed = a.shape[:-2], _transposed(pair, rows, a.shape[:-2])
    columns: list[list[Tensor]] = [[] for _ in pair.theirs]
    for name, each in mine.items():
        rank = each.b.shape[-1]
        there = pair.transform.to_theirs([each.b if n == name else each.b.new_zeros(*lead, rows[n], rank) for n in pair.ours])
        for of_path, part in zip(columns, there, strict=True):
            of_path.append(part.mT if transposed else part)
    magnitudes = [m.flatten() for m in pair.transform.to_theirs([long[name] for name in pair.ours])] if long else [None] * len(pair.theirs)
    for path, of_path, magnitude in zip(pair.theirs, columns, magnitudes, strict=True):
        yield path, Low(a.clone(), torch.cat(of_path, dim=-1), magnitude, transposed)  # safetensors wants no tensor twice


def _transposed(pair: Pair, rows: Mapping[str, int], lead: torch.Size) -> bool:
    """Returns whether the matrix there is stored as (in, out).  lead: leading dimensions, the number of experts."""
    other = sum(rows[name] for name in pair.ours) + 1  # a width that no side of the matrix has
    return _probes(pair, rows, lead, other)[0].shape[-1] != other


def _probes(pair: Pair, rows: Mapping[str, int], lead: torch.Size, columns: int) -> list[Tensor]:
    """Returns tensors without numbers, of the shapes that ours would have there if they had so many columns."""
    return pair.transform.to_theirs([torch.empty(*lead, rows[name], columns, device="meta") for name in pair.ours])


def _tensors(found: Mapping[str, Low]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors by peft's keys. Of two parameters of one module, peft wraps the first within the second. Adapters of experts are
    flattened: rows of A are ordered by expert and then by rank, columns of B by rank and then by expert."""
    for path, each in found.items():
        where, a, b = path.removesuffix(".weight"), each.a, each.b
        if a.ndim == 3:
            where, _, name = path.rpartition(".")
            where += ".base_layer" if name == "gate_up_proj" and f"{where}.down_proj" in found else ""
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)  # (e, r, in) -> (e*r, in); (e, out, r) -> (out, r*e)
        yield f"base_model.model.{where}.lora_A.weight", a.contiguous()
        yield f"base_model.model.{where}.lora_B.weight", b.contiguous()
        if each.m is not None:
            yield f"base_model.model.{where}.lora_magnitude_vector", each.m.contiguous()


def _config(cfg: ModelConfig, adapter: LoRAConfig, found: Mapping[str, Low], known: list[str], base: str) -> Tree:
    """Returns adapter_config.json.  known: paths of all matrices there; where all matrices of one name have an adapter, target_modules has
    this name alone."""
    parameters = sorted(path for path, each in found.items() if each.a.ndim == 3 or path.endswith(".weight"))
    modules = [path for path in found if path not in parameters]
    rest = {path.rpartition(".")[2] for path in known if path not in modules}
    ranks = {path: rank for path, each in found.items() if (rank := each.a.shape[-2]) != adapter.rank}
    times = {path: rank / adapter.rank for path, rank in ranks.items()}
    return {
        "peft_type": "LORA",
        "task_type": _TASKS.get(cfg.kind),
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.rslora,
        "lora_dropout": 0.0 if parameters else adapter.dropout,  # peft has none beside parameters
        "target_modules": sorted({leaf if (leaf := path.rpartition(".")[2]) not in rest else path for path in modules}),
        "target_parameters": parameters or None,
        "rank_pattern": ranks,
        "alpha_pattern": {path: adapter.alpha * (n**0.5 if adapter.rslora else n) for path, n in times.items()},
        "fan_in_fan_out": any(each.transposed for each in found.values() if each.a.ndim == 2),
        "bias": "none",
        "use_dora": adapter.dora,
        "modules_to_save": None,
        "inference_mode": True,
    }


_MODULE = re.compile(r"base_model\.model\.(.+)\.lora_(?:([AB])\.weight|magnitude_vector)")
_UNREAD = {"bias": "none", "modules_to_save": None, "target_parameters": None, "layer_replication": None, "alora_invocation_tokens": None}
_CHANGE_THE_BASE = ("pissa", "olora", "loftq", "corda")  # ways to begin, by what init_lora_weights starts with


def read_peft(folder: Path, family: Family, cfg: ModelConfig, weights: Mapping[str, Tensor]) -> tuple[LoRAConfig, dict[str, Tensor]]:
    """Returns the config and the weights of a peft adapter of a model of this family. Raises ConfigError for an adapter that is no LoRA or
    DoRA of lm's kind or does not fit the model, CheckpointError for files that are damaged.

    weights: of the model."""
    config, theirs = read_json(folder / CONFIG, foreign=True), _low_ranks(folder)
    _require_lora(folder, config)
    rows = {name: p.shape[-2] for name, p in build_model(cfg, device="meta").named_parameters() if p.ndim == 2}
    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    grown: dict[str, Tensor] = {}
    alpha_of, rslora = config.get("alpha_pattern") or {}, config.get("use_rslora")
    for pair in _modules([pair for pair in family.pairs(resolved(cfg)) if pair.ours[0] in rows and not isinstance(pair.transform, Copies)]):
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
    if theirs or not found:
        raise ConfigError(
            f"{folder}: it adapts {next(iter(theirs), 'nothing')}, which is no matrix of the base. Give the base that it is of."
        )
    return _ours(folder, config, cfg, found, grown)


def _split(
    pair: Pair, rows: Mapping[str, int], mine: Mapping[str, Low], times: Mapping[str, float], weights: Mapping[str, Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Returns the A of all our matrices, the B of each, and with DoRA the magnitude of each, (out,).  mine: the adapters by path there, of
    one matrix or of some of those that one of ours is; times: what the B of each is multiplied by."""
    found, transposed = [each.a for each in mine.values()], _transposed(pair, rows, torch.Size())
    shared = all(torch.equal(found[0], other) for other in found)  # as `_fused` writes it
    a = found[0] if shared else torch.cat(found)
    dora, at = any(each.m is not None for each in mine.values()), 0
    b, m = [], pair.transform.to_theirs([lengths(weights[name]).unsqueeze(1) for name in pair.ours]) if dora else []
    for i, (path, probe) in enumerate(zip(pair.theirs, _probes(pair, rows, torch.Size(), len(a)), strict=True)):
        there = a.new_zeros(probe.mT.shape if transposed else probe.shape)
        if (each := mine.get(path)) is not None:
            there = pad(each.b * times[path], (at, len(a) - at - len(each.a)))
            at += 0 if shared else len(each.a)
            if each.m is not None:
                m[i] = each.m.unsqueeze(0 if transposed else 1)
        b.append(there.mT.contiguous() if transposed else there)
    return a, pair.transform.to_ours(b), [each.flatten() for each in pair.transform.to_ours(m)] if dora else []


def _low_ranks(folder: Path) -> dict[str, Low]:
    """Returns the low-rank matrices by the path of their module. Raises ConfigError for other tensors, CheckpointError for damaged
    files."""
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: cannot be read ({error}). Restore the file.") from None
    named = {key: _MODULE.fullmatch(key) for key in tensors}
    if other := next((key for key, match in named.items() if match is None), None):
        raise ConfigError(f"{folder / WEIGHTS}: {other} is no lora_A or lora_B of a module, and nothing else is read. Merge it with peft.")
    found: dict[str, dict[str, Tensor]] = {}
    for key, match in named.items():
        assert match is not None
        require_finite(key, tensors[key], str(folder / WEIGHTS), "Use another adapter")
        found.setdefault(match[1], {})[match[2] or "M"] = tensors[key]
    for path, each in found.items():
        sizes = {part: tensor.shape for part, tensor in each.items()}
        a, b = sizes.get("A", ()), sizes.get("B", ())
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or sizes.get("M", b[:1]) != b[:1]:
            raise CheckpointError(f"{folder / WEIGHTS}: A and B of {path} do not fit each other. Restore the file.")
    return {path: Low(each["A"], each["B"], each.get("M")) for path, each in found.items()}


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
    folder: Path, config: Tree, cfg: ModelConfig, found: Mapping[str, tuple[Tensor, Tensor, float]], grown: Mapping[str, Tensor]
) -> tuple[LoRAConfig, dict[str, Tensor]]:
    """Returns an adapter of one rank and scale, and its weights: where peft's ranks or scales differ, lower ranks are padded with zeros,
    and the scale is multiplied into B. Raises ConfigError for shapes that do not fit the model."""
    alike = len({(len(a), scale) for a, _, scale in found.values()}) == 1
    rank = max(len(a) for a, _, _ in found.values())
    scaled: Tree = {"alpha": float(config["lora_alpha"]), "rslora": bool(config.get("use_rslora"))}
    if not alike:
        scaled = {"alpha": float(rank)}
    elif (scale := next(scale for _, _, scale in found.values())) != scaled["alpha"] / (sqrt(rank) if scaled["rslora"] else rank):
        scaled = {"alpha": rank * scale}
    own = {**grown}
    for stem, (a, b, scale) in found.items():
        own[f"{stem}lora_a"] = pad(a, (0, 0, 0, rank - len(a))).contiguous()
        own[f"{stem}lora_b"] = pad(b if alike else b * scale, (0, rank - len(a))).contiguous()
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    for targets in (None, sorted(stem.removesuffix(".") for stem in found)):
        adapter = LoRAConfig(rank=rank, dropout=float(config.get("lora_dropout", 0.0)), targets=targets, dora=bool(grown), **scaled)
        model = build_model(cfg, device="meta")
        try:
            adapter.apply(model)
        except ValueError as error:  # says which target is not one, or is too narrow
            if targets is None:
                continue
            reason, _, _ = str(error).partition(". ")
            raise ConfigError(f"{folder}: it has no form here, since {reason}. Merge it with peft.") from None
        if {name: tuple(p.shape) for name, p in adapting(model).items()} == shapes:
            return adapter, own
    raise _other_shapes(folder)


def _other_shapes(folder: Path) -> ConfigError:
    return ConfigError(f"{folder}: its matrices are not of the shapes that the base has. Give the base that it is of.")
