import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported, here and in every process that a test starts: on tensors this small, threads cost more than they bring (where
# two were set on two busy cores, the tests took many times as long).
os.environ["OMP_NUM_THREADS"] = "1"

for _own in ("LM_CONFIG_DIR", "LM_PLUGINS", "LM_FAILPOINT"):
    os.environ.pop(_own, None)  # what whoever runs the tests has set for runs of their own

gc.set_threshold(20_000, 50, 50)  # looking for cycles among all that is imported here took 4 % of the tests' time

Lm = Callable[..., tuple[int, str, str]]

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc, or limits memory as Linux alone does")


@contextmanager
def started(args: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A process that does not outlive the block, also where the test fails. options: of subprocess.Popen."""
    with subprocess.Popen(args, text=True, **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **options}) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root, who may read and write everything, is nobody within the block."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.fixture
def public() -> Iterator[Path]:
    """An empty folder that others may look into, unlike tmp_path, and into what is made there."""
    mask = os.umask(0o022)
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            with unprivileged():
                seen = os.access(folder, os.R_OK, effective_ids=os.access in os.supports_effective_ids)
            if not seen:
                pytest.skip("others do not see the folder of temporary files")
            yield Path(folder)
    finally:
        os.umask(mask)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with more than two cases `make test` runs every twentieth one and the last, where what is new mostly stands;
    `make test-all` all."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        for n, item in enumerate(same):
            if len(same) > 2 and n % 20 and n < len(same) - 1:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long says so on stderr, and on a busy machine everything does."""
    monkeypatch.setattr("lm.progress._SILENT_S", 60.0)


@pytest.fixture(autouse=True)
def alike() -> None:
    """What a test draws does not depend on the tests before it, which differ with the number of workers. Seen to fail: 5 in 100 draws of a
    comparison with a kernel in float32."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)  # torch.manual_seed writes down a stack for each kind of GPU that is not there


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process loads is known to no later test, nor to its processes. Seen to fail: a test that draws any kind of norm drew one
    of a plugin, which no model can be built with."""
    from lm.schema import Slot

    monkeypatch.setenv("LM_PLUGINS", "")
    monkeypatch.setattr("lm.plugins._loaded", {})
    for slot in Slot.__subclasses__():
        monkeypatch.setattr(slot, "_registry", dict(slot._registry))


@pytest.fixture
def doubles() -> Iterator[None]:
    """Everything of the test in float64: what it draws, what it builds, and what asks for float32 (but in a backward pass)."""
    import torch

    from lm.testing.models import Doubles

    torch.set_default_dtype(torch.float64)
    try:
        with Doubles():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def server() -> Iterator[Path]:
    """Commands start here without the seconds that imports take: tests/server.py."""
    from tests.server import serving

    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as path:  # the path of a socket has 108 bytes at most
        yield path


@pytest.fixture
def lm(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lm:
    """The command line in this process, in an empty folder: exit code, stdout, stderr."""
    from lm.cli.main import main

    monkeypatch.chdir(tmp_path)
    for variable in ("LM_CONFIG_DIR", "LM_PLUGINS"):
        monkeypatch.setenv(variable, "")  # what a command adds for the processes that it starts is forgotten after the test

    def run(*args: str) -> tuple[int, str, str]:
        code = main(list(args))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
