"""Floors and doors of docs/design.md, and the length of files, read off the syntax tree."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "lm").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))

ROOMS = {
    -1: ["lm.collector", "lm.heap", "lm.schema", "lm.spelling", "lm.errors", "lm.plugins", "lm.printing", "lm.progress", "lm.units"],
    0: ["lm.ops"],
    1: ["lm.nn"],
    2: ["lm.adapters", "lm.cost", "lm.losses"],
    3: ["lm.storage"],
    4: ["lm.data"],
    5: ["lm.generation"],
    6: ["lm.hf", "lm.training", "lm.report"],
    7: ["lm.ablation", "lm.serving"],
    8: ["lm.cli"],
    9: ["lm", "lm.__main__", "lm.kinds", "lm.testing"],
}
FLOORS = {room: floor for floor, rooms in ROOMS.items() for room in rooms}

DOORS = {
    "fla": "lm/ops/recurrence/kernels.py",
    "hydra": "lm/cli/compose/",
    "omegaconf": "lm/cli/compose/",
    "lightning": "lm/training/",
    "pytorch_lightning": "lm/training/",
    "deepspeed": "lm/training/strategies/",
    "wandb": "lm/training/callbacks/wandb_.py",
    "tokenizers": "lm/data/tokenizer/",
    "tiktoken": "lm/data/tokenizer/tiktoken_.py",
    "datasets": "lm/data/sources/hub.py",
    "matplotlib": "lm/report/",
    "scipy": ("lm/report/statistics.py", "lm/report/noise.py", "lm/ablation/scaling/fit.py"),
    "submitit": "lm/ablation/",
    "fastapi": "lm/serving/",
    "starlette": "lm/serving/",
    "uvicorn": "lm/serving/",
    "lm_eval": "lm/generation/harness.py",
    "transformers": "lm/hf/io/",
    "gguf": "lm/hf/gguf/writing.py",
    "ray": "lm/data/on_ray.py",
    "fsspec": "lm/storage/remote.py",
    "aiohttp": "lm/storage/remote.py",
    "llguidance": "lm/generation/grammar",
}


def name_of(file: Path) -> str:
    """lm/nn/norm.py -> lm.nn.norm; lm/__init__.py -> lm."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """lm.nn.norm -> lm.nn; a file directly under lm/ is a room of its own."""
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and ".".join(parts[:2]) in FLOORS else "lm"


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, lazy ones and those for type checkers included."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            yield node.lineno, str(node.module)
            if (ROOT / str(node.module).replace(".", "/")).is_dir():
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def floor_faults(name: str, imported: str) -> str:
    """Why `name` may not import `imported`; '' where it may."""
    here, there = room_of(name), room_of(imported)
    own_folder = here == there or (name.count(".") == imported.count(".") == 1 and not (ROOT / imported.replace(".", "/")).is_dir())
    if FLOORS[there] > FLOORS[here]:
        return "upward"
    return "" if own_folder or FLOORS[there] < FLOORS[here] else "a sibling on the same floor"


def test_the_walk_finds_the_house() -> None:
    assert len(MODULES) >= 50
    assert {"lm.schema", "lm.nn.block", "lm.data.loader", "lm.storage.checkpoint", "lm.training.run", "lm.cli.main"} <= set(
        map(name_of, MODULES)
    )
    assert len(TESTS) >= 15
    assert sum(1 for file in MODULES for _ in imports(file)) >= 300


def test_every_module_has_a_floor() -> None:
    rooms = {".".join(name_of(file).split(".")[:2]) for file in MODULES}
    assert rooms <= FLOORS.keys()


@pytest.mark.parametrize(
    ("name", "imported", "fault"),
    [
        ("lm.nn.norm", "lm.schema", ""),
        ("lm.nn.norm", "lm.nn.init", ""),
        ("lm.nn.norm", "lm.data.loader", "upward"),
        ("lm.ops.norm", "lm.nn.norm", "upward"),
        ("lm.losses.tokens", "lm.cost.count", "a sibling on the same floor"),
        ("lm.report.page", "lm.hf.io.reading", "a sibling on the same floor"),
        ("lm.storage.checkpoint", "lm.storage.atomic", ""),
        ("lm.storage.checkpoint", "lm.data.loader", "upward"),
        ("lm.report.page", "lm.training.run", "a sibling on the same floor"),
        ("lm.storage.run_folder", "lm.cli.main", "upward"),
        ("lm.training.run", "lm", "upward"),
        ("lm.cli.main", "lm.training.run", ""),
    ],
)
def test_the_rule_of_floors_tells_right_from_wrong(name: str, imported: str, fault: str) -> None:
    assert floor_faults(name, imported) == fault


def test_no_import_goes_up_or_sideways() -> None:
    inside = [(file, line, to) for file in MODULES for line, to in imports(file) if to.startswith("lm.") and to != "lm.__version__"]
    ranked = [(file, line, to) for file, line, to in inside if name_of(file) != "lm"]
    assert not [f"{file}:{line}: {to} is {fault}" for file, line, to in ranked if (fault := floor_faults(name_of(file), to))]


def test_dependencies_come_in_by_their_own_door() -> None:
    foreign = [(file.relative_to(ROOT).as_posix(), line, module.split(".")[0]) for file in MODULES for line, module in imports(file)]
    assert not [
        f"{file}:{line}: {module} is {DOORS[module]}'s" for file, line, module in foreign if not file.startswith(DOORS.get(module, ""))
    ]


def distribution(name: str) -> str:
    """The distribution of a module, as PyPI and PEP 503 spell it."""
    return {"yaml": "pyyaml", "hydra": "hydra-core", "fla": "fla-core"}.get(name, name.replace("_", "-"))


WITHIN = {"pydantic_core": "pydantic", "starlette": "fastapi", "h11": "uvicorn", "triton": "torch", "aiohttp": "fsspec"}
"""Module -> the dependency of ours that it is a part of, or always brings: aiohttp is what fsspec[http] is for."""


def test_all_that_is_imported_is_declared() -> None:
    """Seen to fail: huggingface_hub and aiohttp came only because datasets asks for them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name, extra in project["optional-dependencies"].items() if name not in ("dev", "docs", "bench") for each in extra]
    asked = {re.split(r"[^\w.-]", each)[0] for each in [*project["dependencies"], *extras]}
    found = {name.split(".")[0] for file in MODULES for _, name in imports(file)} - {"lm", *sys.stdlib_module_names}
    assert {"torch", "peft", "yaml"} < found
    assert {name for name in found if distribution(WITHIN.get(name, name)) not in asked} == set()
    assert "fsspec[http]" in " ".join(project["dependencies"])


def printed(file: Path) -> Iterator[str]:
    """What in a file reaches stdout or stderr."""
    for node in ast.walk(parsed(file)):
        text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        if text in {"print", "pprint", "sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__", "traceback.print_exc"} or (
            isinstance(node, ast.alias) and node.name in {"stdout", "stderr", "print_exc", "rich"}
        ):
            yield text or str(getattr(node, "name", ""))


def test_what_reaches_a_terminal_goes_through_one_door() -> None:
    """Beside programs whose stdout is a pipe to the one that started them."""
    pipes = {"lm.data.tokenizer.rendering", "lm.generation.grammar_program", "lm.training.callbacks.wandb_"}
    assert {name_of(file) for file in MODULES if set(printed(file))} <= {"lm.printing", *pipes}


def foreign(room: str, allowed: set[str]) -> list[str]:
    """What files of a room import of other packages than these and the standard library."""
    return [
        f"{file}:{line}: {module}"
        for file in MODULES
        if name_of(file).startswith(room)
        for line, module in imports(file)
        if module.split(".")[0] not in allowed | sys.stdlib_module_names
    ]


def test_the_model_needs_torch_and_pydantic_only() -> None:
    assert not [found for room in ("lm.nn", *ROOMS[2]) for found in foreign(room, {"torch", "pydantic", "lm"})]


def test_operations_know_no_configs_and_hold_no_weights() -> None:
    assert not foreign("lm.ops", {"torch", "lm", "fla", "triton"})  # fla: kernels, where they are installed, which triton compiles
    ops = [file for file in MODULES if name_of(file).startswith("lm.ops")]
    assert not [f"{file}:{line}" for file in ops for line, module in imports(file) if module == "lm.schema"]
    makes = {
        "nn.Parameter",
        "nn.Linear",
        "nn.Embedding",
        "torch.nn.Parameter",
        "torch.nn.Linear",
        "self.register_parameter",
        "self.register_buffer",
    }
    made = [file.relative_to(ROOT).as_posix() for file in ops for node in ast.walk(parsed(file)) if isinstance(node, ast.Call)
            and ast.unparse(node.func) in makes]  # fmt: skip
    assert made == ["lm/ops/ranks/tensor_parallel.py"]  # the slice of a weight that is there


def test_files_are_short() -> None:
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in (*MODULES, *TOOLS, *TESTS)}
    assert not {file: n for file, n in lines.items() if n > (500 if file in TESTS else 300)}


def test_no_module_is_a_drawer() -> None:
    assert not [file for file in (*MODULES, *TOOLS) if file.stem in {"utils", "util", "common", "helpers", "misc"}]


HEAVY = {
    "datasets", "deepspeed", "lightning", "matplotlib", "scipy", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor",
    "torch.onnx", "torchmetrics", "transformers", "wandb",
}  # fmt: skip


def test_importing_lm_is_quick_and_leaves_the_heavy_dependencies_alone() -> None:
    program = (
        "import sys, time; started = time.perf_counter(); import lm; assert time.perf_counter() - started < 1.5; lm.build_model;"
        "import lm.generation.load, lm.training.run;"  # what comes before the data and the prompt
        f"heavy = {HEAVY} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
