"""An optimizer whose state lives in files, by DeepSpeed's async_io: the bits of the one in memory, killed and resumed as well."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.training.config import TrainConfig
from tests.training.conftest import Configure, Launch, ranks, results

MIB = 2**20  # DeepSpeed leaves smaller groups in memory
WIDE = ["model.d_model=256", "model.ffn.hidden=1024", "optim=adamw", "trainer.micro_batch=2", "strategy.sub_group_size=280000"]


def compiles() -> bool:
    """Whether DeepSpeed can compile its async_io here, for which it needs libaio and its header."""
    if importlib.util.find_spec("deepspeed") is None:
        return False
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible())


@pytest.mark.slow
def test_state_in_files_trains_and_resumes_to_the_bits_of_state_in_memory(
    configure: Configure, launch: Launch, killed: Callable[..., None], tmp_path: Path
) -> None:
    """Killed behind the save of step 4, when the files are there, and they hold more than a group; at a regular end they are removed."""
    if not compiles():
        pytest.skip("needs deepspeed, and libaio-dev to compile its async_io")
    disk = tmp_path / "disk"
    disk.mkdir()

    def run(name: str, *more: str) -> TrainConfig:
        return configure(*ranks("zero3_offload"), *WIDE, "trainer.max_steps=8", f"run.name={name}", *more)

    filed = f"strategy.nvme={disk}"
    launch(run("memory"))
    killed(run("files", filed))
    left = [path for path in disk.rglob("*.swp") if path.stat().st_size >= MIB]
    assert {path.name.partition("-")[0] for path in left} >= {"exp_avg", "exp_avg_sq"}
    launch(run("files", filed))
    assert results(tmp_path / "files") == results(tmp_path / "memory")
    assert not [*disk.iterdir()]
