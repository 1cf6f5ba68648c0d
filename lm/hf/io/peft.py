"""Writing an adapter as peft has it: adapter_config.json, and low-rank matrices under the names of the modules that transformers builds.

Where transformers has one matrix for several of ours, W = [W1; W2], its adapter is [B1 0; 0 B2] [A1; A2], with one scale for all.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from lm.adapters.adapter import LoRAConfig
from lm.errors import ConfigError
from lm.hf.io.family import Family, Pair, resolved
from lm.hf.io.transforms import Halves, Stack
from lm.hf.io.whole import OF_LABELS, PREFIX, to_modules
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import build_model
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
    pairs = [*modules([pair for pair in family.built_pairs(resolved(cfg)) if pair.ours[0] in rows])]
    long = {name: adapter.magnitude(name, weights, own).unsqueeze(1) for name in rows if name in weights} if adapter.dora else {}
    found = {path: each for pair in pairs for path, each in _fused(pair, low, rows, long)}
    if path := next((path for path in found if path.endswith(tuple(f".{name}" for name in family.unadapted))), None):
        raise ConfigError(f"format=peft: peft adds no adapter to {path} of a {family.name}. Use format=hf, which merges it into the model.")
    whole = to_modules(family, cfg, adapter, own, weights, [path.removesuffix(".weight") for path in found])
    tensors = dict(_tensors(found)) | whole
    for name, tensor in tensors.items():
        require_finite(name, tensor, "export", "Use another checkpoint")
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    saved = sorted({key.removeprefix(PREFIX).rpartition(".")[0] for key in whole})
    config = _config(adapter, found, [path for pair in pairs for path in pair.theirs], base)
    write_json(folder / CONFIG, config | {"task_type": _task(cfg, saved), "modules_to_save": saved or None})


def highest_rank(folder: Path) -> int:
    """Returns the rank of the largest matrix of a written adapter; that of a fused matrix is the sum of the ranks of its parts."""
    config = read_json(folder / CONFIG)
    return max([config["r"], *config["rank_pattern"].values()])


def modules(pairs: list[Pair]) -> Iterator[Pair]:
    """Yields the pairs under the names of transformers' built model: the paths of modules, and of experts those of parameters. Experts that
    are separate tensors in the file become two parameters of a module below mlp, one of gate and up together and one of down; Switch keeps
    them apart. Where there are such experts, peft takes any module in mlp that is called as a part of them for an expert; so matrices there
    are named by their parameter `weight`."""
    stacks = [pair for pair in pairs if isinstance(pair.transform, Stack) and ".expert_" not in pair.theirs[0]]
    for pair in pairs:
        if pair in stacks:
            layer, _, part = pair.theirs[0].split(".experts.")[0].rpartition(".")
            path = f"{layer}.{'feed_forward' if part == 'feed_forward' else 'mlp'}.experts"
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
            yield pair.renamed(lambda path: path.removesuffix(".weight"))


def _fused(pair: Pair, low: Mapping[str, Low], rows: Mapping[str, int], long: Mapping[str, Tensor]) -> Iterator[tuple[str, Low]]:
    """Yields by path the adapters of the matrices there, joined from the adapters of our matrices that they consist of; none where none of
    these has one.  long: with DoRA the magnitudes of all our matrices, (out, 1) each."""
    mine = {name: low[name] for name in pair.ours if name in low}
    if not mine:
        return
    a = torch.cat([each.a for each in mine.values()], dim=-2)
    lead, turned = a.shape[:-2], transposed(pair, rows, a.shape[:-2])
    columns: list[list[Tensor]] = [[] for _ in pair.theirs]
    for name, each in mine.items():
        rank = each.b.shape[-1]
        there = pair.transform.to_theirs([each.b if n == name else each.b.new_zeros(*lead, rows[n], rank) for n in pair.ours])
        for of_path, part in zip(columns, there, strict=True):
            of_path.append(part.mT if turned else part)
    magnitudes = [m.flatten() for m in pair.transform.to_theirs([long[name] for name in pair.ours])] if long else [None] * len(pair.theirs)
    for path, of_path, magnitude in zip(pair.theirs, columns, magnitudes, strict=True):
        yield path, Low(a.clone(), torch.cat(of_path, dim=-1), magnitude, turned)  # safetensors wants no tensor twice


def transposed(pair: Pair, rows: Mapping[str, int], lead: torch.Size) -> bool:
    """Returns whether the matrix there is stored as (in, out).  lead: leading dimensions, the number of experts."""
    other = sum(rows[name] for name in pair.ours) + 1  # a width that no side of the matrix has
    return probes(pair, rows, lead, other)[0].shape[-1] != other


def probes(pair: Pair, rows: Mapping[str, int], lead: torch.Size, columns: int) -> list[Tensor]:
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
        yield f"{PREFIX}{where}.lora_A.weight", a.contiguous()
        yield f"{PREFIX}{where}.lora_B.weight", b.contiguous()
        if each.m is not None:
            yield f"{PREFIX}{where}.lora_magnitude_vector", each.m.contiguous()


def _task(cfg: ModelConfig, saved: list[str]) -> str | None:
    """Returns what peft takes the model for: as one that generates it asks for what a classifier does not have, and as a classifier for
    a head among the modules that are `saved` whole."""
    if cfg.head.labels is None:
        return _TASKS.get(cfg.kind)
    return "SEQ_CLS" if any(path.partition(".")[0] in OF_LABELS for path in saved) else None


def _config(adapter: LoRAConfig, found: Mapping[str, Low], known: list[str], base: str) -> Tree:
    """Returns adapter_config.json.  known: paths of all matrices there; where all matrices of one name have an adapter, target_modules has
    this name alone."""
    parameters = sorted(path for path, each in found.items() if each.a.ndim == 3 or path.endswith(".weight"))
    modules = [path for path in found if path not in parameters]
    rest = {path.rpartition(".")[2] for path in known if path not in modules}
    ranks = {path: rank for path, each in found.items() if (rank := each.a.shape[-2]) != adapter.rank}
    times = {path: rank / adapter.rank for path, rank in ranks.items()}
    return {
        "peft_type": "LORA",
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
        "inference_mode": True,
    }
