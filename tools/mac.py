"""Runs a command of lm with a Mac's GPU that is not there: its tensors lie in the host's memory, and its operations are the CPU's.

    python tools/mac.py train debug=fast trainer.device=mps
    python tools/mac.py generate from=runs/NAME device=mps prompt=The

What would fail on such a GPU for want of something fails here too: an operation that torch has no kernel for there, by the list that torch
is built from, a tensor of float64, an operation on tensors of two devices. Whether a kernel is right, how fast it is, and what becomes of a
number that is read before it is there, only a Mac can tell. Wants g++, for ten seconds at the first call.
"""

import ctypes
import hashlib
import os
import platform
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.cpp_extension import include_paths

sys.path.insert(0, str(Path(__file__).parents[1]))
from lm.ops import defaults

SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARIES = Path(torch.__file__).parent / "lib"
_SERVED = {"MPS", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}


def kernels() -> list[str]:
    """The operations that torch has on Macs' GPUs, as `add_.Tensor`."""
    listed = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    entries = {entry["func"].partition("(")[0]: entry for entry in yaml.load(listed.read_text(encoding="utf-8"), yaml.CSafeLoader)}
    done_by = {name: entries.get(entry.get("structured_delegate"), entry) for name, entry in entries.items()}
    return [name for name, entry in done_by.items() if not _SERVED.isdisjoint(_keys(entry))]


def _keys(entry: dict[str, Any]) -> Iterator[str]:
    for keys in entry.get("dispatch", {"CompositeImplicitAutograd": ""}):
        yield from keys.replace(" ", "").split(",")


def built() -> Path:
    """Returns the compiled SOURCE, of this torch, from the folder of temporary files if it is there."""
    of = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"lm-mac-{os.getuid()}-{of}.so"
    if not library.exists() or library.stat().st_uid != os.getuid():  # of somebody else: it would be run as this user
        new = library.with_suffix(f".{os.getpid()}")
        search = [f"-I{path}" for path in include_paths()]
        linked = [f"-L{LIBRARIES}", "-lc10", "-ltorch_cpu", "-ltorch"]
        subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *search, str(SOURCE), *linked, "-o", str(new)], check=True)
        new.replace(library)
    return library


def install() -> None:
    """Gives this process the GPU."""
    os.environ["LM_MAC_KERNELS"] = "\n".join(kernels())
    ctypes.CDLL(str(built()))
    for where, name, answer in (
        (torch.backends.mps, "is_available", True),
        (torch.mps, "is_available", True),
        (torch.backends.mps, "get_name", "a GPU that is not there"),
        (torch.mps, "driver_allocated_memory", 0),
        (platform, "processor", "arm"),  # Lightning asks
    ):
        setattr(where, name, partial(lambda answer: answer, answer))
    torch.mps.manual_seed = lambda seed: None  # its numbers are the CPU's
    torch.mps.get_rng_state = lambda device="mps": torch.get_rng_state()
    torch.mps.set_rng_state = lambda new_state, device="mps": torch.set_rng_state(new_state)
    defaults.MAC_SINCE = "0"  # and so are its sums


if __name__ == "__main__":
    install()
    sys.path[0] = ""
    sys.argv[0] = "lm"
    runpy.run_module("lm", run_name="__main__")
