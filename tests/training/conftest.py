import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lm.cli.compose.compose import compose_config
from lm.errors import ResourceError
from lm.storage.atomic import MANIFEST
from lm.training.callbacks.metrics import read
from lm.training.config import TrainConfig
from lm.training.launch.launcher import launch

ROOT = Path(__file__).parents[2]
Configure = Callable[..., TrainConfig]
WORDS = "def return import class self value for in while if else none model data token print read"
TINY = (
    *("model=nano", "model.d_model=32", "model.n_layers=1", "model.attention.n_heads=2", "model.ffn.hidden=64", "model.dropout=0.1"),
    *("tokenizer=bytes", "data=text", "data.seq_len=32", "data.global_batch=8", "trainer.max_steps=12", "trainer.log_every=1"),
    *("trainer.val_every=4", "data.val_rows=8", "checkpoint.every=4", "schedule.warmup_steps=2", "trainer.device=cpu"),
    *("trainer.sample_prompts=[]", "run.name=run"),
)


def write_text(path: Path, lines: int = 50, seed: int = 0) -> Path:
    """50 lines give 8 steps an epoch."""
    draw = random.Random(seed)
    path.write_text("\n".join(" ".join(draw.choices(WORDS.split(), k=8)) for _ in range(lines)), encoding="utf-8")
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Overrides of `lm train` for a run of a second in `tmp_path`/run."""
    text = write_text(tmp_path / "text.txt")
    return [*TINY, f"run.dir={tmp_path}", f"data.files={text}", f"data.cache_dir={tmp_path / 'cache'}"]


@pytest.fixture
def configure(tiny: list[str]) -> Configure:
    """The config of that run with more overrides."""

    def run(*overrides: str) -> TrainConfig:
        return compose_config([*tiny, *overrides])

    return run


def results(run: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """What a resumed run must share with one that was left alone: the model's bytes, and the metrics but for timing and memory."""
    weights = (run / "model" / "model.safetensors").read_bytes()
    timing = ("tokens_per_second", "step_s", "memory_gib")
    return weights, [{key: value for key, value in line.items() if key not in timing} for line in read(run / "metrics.jsonl")]


SERVER = """
import json, os, signal, sys
import lightning, lm.report.curves, lm.training.run, torch.utils.tensorboard
from lm.cli.main import main
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for number, name in enumerate(["/dev/null", *request["outputs"]]):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY, 0o600), number)
        code = main(request["args"])
        sys.stdout.flush()
        os._exit(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Process:
    """`lm ARGS` as a process in a group of its own, forked from one that has done the importing."""

    def __init__(self, server: "subprocess.Popen[str]", folder: Path, args: list[str]) -> None:
        assert server.stdin is not None and server.stdout is not None
        self._folder, self._answers = folder, server.stdout
        outputs = [str(folder / "stdout"), str(folder / "stderr")]
        print(json.dumps({"args": args, "outputs": outputs}), file=server.stdin, flush=True)
        self.pid = int(server.stdout.readline())

    def wait(self) -> int:
        return int(self._answers.readline())

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()


@pytest.fixture(scope="session")
def server() -> Iterator["subprocess.Popen[str]"]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture
def lm_process(server: "subprocess.Popen[str]", tmp_path: Path) -> Callable[..., Process]:
    """One at a time; its output is read from files when it has ended."""

    def run(*args: str) -> Process:
        folder = tmp_path / "output"
        folder.mkdir(exist_ok=True)
        return Process(server, folder, list(args))

    return run


def ranks(strategy: str, devices: int = 2) -> list[str]:
    return [f"strategy={strategy}", f"launch.devices={devices}"]


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Another content of a JSON file, under a manifest that agrees."""
    (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text()))))
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()}))


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainConfig, int], None]:
    """Start a run whose rank 0 is killed right behind its n-th save."""

    def run(cfg: TrainConfig, saves: int = 1) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("LM_FAILPOINT", "renamed:kill")
            for _ in range(saves):
                with pytest.raises(ResourceError, match="rank 0: the process was killed by SIGKILL"):
                    launch(cfg)

    return run
