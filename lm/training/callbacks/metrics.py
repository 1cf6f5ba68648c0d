"""metrics.jsonl, the truth that every plot and test reads, and the numbers that only the machine knows."""

import json
import logging
import math
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lm.config import Tree
from lm.errors import CheckpointError
from lm.storage.atomic import TEMPORARY, disk_errors

log = logging.getLogger("lm")

# Dense bf16 FLOP/s with fp32 accumulation, by words that the device name must hold; the first match counts. NVIDIA's data sheets
# (half of what they print "with sparsity"): A100, H100, H200, GH200, HGX B200, L4, L40, L40S, A10; for GeForce and RTX A cards
# the tables of the GA102, Ada and RTX Blackwell architecture white papers.
_PEAKS = (
    ("B200", 2250e12),
    ("GH200", 990e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("A6000", 154.8e12),
    ("5090", 209.5e12),
    ("4090", 165.2e12),
    ("3090", 71e12),
)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its CUDA name; None where unknown, so that no utilisation is shown rather than a wrong one."""
    words = set(device_name.replace("-", " ").split())
    if words & {"Laptop", "D", "MIG", "Ti"}:
        return None
    return next((peak for name, peak in _PEAKS if set(name.split()) <= words), None)


def memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far: what torch reserved on a GPU, the resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def expert_loads(loads: torch.Tensor, names: Iterable[str]) -> Tree:
    """Of each MoE layer, in the last step: the tokens of its busiest expert over the mean.  loads: (layers, e)."""
    ratios = (loads.amax(-1) / loads.mean(-1)).tolist()
    return {f"expert_load/{name}": round(ratio, 4) for name, ratio in zip(names, ratios, strict=True)}


class MetricsFile:
    """One JSON object a line. A number that is not finite is written as null, since JSON has no NaN."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._expected = path.exists()

    def append(self, record: Tree) -> None:
        """Opened for each line, so that a file deleted mid run starts again, with one warning."""
        if self._expected and not self._path.exists():
            log.warning("%s: the file was deleted while the run writes it; a new one starts here.", self._path)
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(record))
        self._expected = True

    def truncate(self, step: int) -> None:
        """Drop the records after `step`, and a torn last line: what a resumed run is about to write again."""
        kept = [record for record in read(self._path) if record["step"] <= step] if self._path.exists() else []
        temporary = self._path.with_name(TEMPORARY + self._path.name)
        with disk_errors(self._path):
            temporary.write_text("".join(map(_line, kept)), encoding="utf-8")
            temporary.replace(self._path)
        self._expected = True


def read(path: Path) -> list[Tree]:
    """The records of a metrics file. The last line may be torn by a kill; any other broken one is a CheckpointError."""
    records: list[Tree] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Give the folder of a run.") from None
    for number, line in enumerate(lines, 1):
        try:
            records += [_record(line)] if line else []
        except ValueError as error:
            if number < len(lines):
                raise CheckpointError(f"{path}:{number}: {error}. Remove the line.") from None
    return records


def _record(line: bytes) -> Tree:
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError("not a JSON object with a step")
    return record


def _line(record: Tree) -> str:
    return json.dumps(_finite(record), allow_nan=False, ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
