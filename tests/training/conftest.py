import hashlib
import importlib.util
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning import Callback, Trainer
from safetensors.torch import load_file

from lm.cli.compose.compose import compose_config
from lm.errors import CheckpointError, ConfigError, Interrupted, LmError, NumericsError, ResourceError
from lm.storage.manifest import MANIFEST
from lm.storage.run_folder import Metrics
from lm.training.config import TrainConfig
from lm.training.module import TrainModule
from lm.training.run import train_rank
from tests.server import Process

Configure = Callable[..., TrainConfig]
Launch = Callable[..., None]
Stop = Callable[..., None]
WORDS = "def return import class self value for in while if else none model data token print read"
TINY = (
    *("model=nano", "model.d_model=32", "model.n_layers=1", "model.attention.n_heads=2", "model.ffn.hidden=64", "model.dropout=0.1"),
    *("tokenizer=bytes", "data=text", "data.seq_len=32", "data.global_batch=8", "trainer.max_steps=12", "trainer.log_every=1"),
    *("trainer.val_every=4", "data.val_rows=8", "checkpoint.every=4", "schedule.warmup_steps=2", "trainer.device=cpu"),
    *("trainer.sample_prompts=[]", "run.name=run"),
)


needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install 'slotlm[deepspeed]'")


def settled(*args: str) -> list[str]:
    """Of a key that is there twice, the last: behind `tiny` stands what a test has of its own."""
    return list({arg.partition("=")[0]: arg for arg in args}.values())


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """As on a disk that is full, what is written meanwhile is refused half way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl."""
    return Metrics(path).read()


def results(run: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """What a resumed run must share with one that was left alone: the model's bytes, and the metrics but for timing and memory."""
    weights = (run / "model" / "model.safetensors").read_bytes()
    timing = ("tokens_per_second", "step_s", "data_s", "draw_s", "judge_s", "memory_gib")
    return weights, [{key: value for key, value in line.items() if key not in timing} for line in read(run / "metrics.jsonl")]


class Before(Callback):
    """Does something right before a step."""

    def __init__(self, step: int, act: Callable[[Any], object]) -> None:
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.step == self.step - 1:
            self.act(pl_module)


@pytest.fixture
def lm_process(server: Path, tmp_path: Path) -> Callable[..., Process]:
    """`lm ARGS`, settled, as a process in `tmp_path`.  env: of the process."""

    def run(*args: str, env: Mapping[str, str] | None = None) -> Process:
        return Process(server, tmp_path, ["-m", "lm", *settled(*args)], env)

    return run


@pytest.fixture
def launch(server: Path, tmp_path: Path) -> Launch:
    """lm.training.launch.launcher.launch in a process of its own, and its error here.  worker: the module that the ranks run."""

    def run(cfg: TrainConfig, worker: str = "lm.training.worker") -> None:
        config, told = tmp_path / "launched.yaml", tmp_path / "launched.error"
        config.write_text(yaml.safe_dump(cfg.tree(), allow_unicode=True), encoding="utf-8")
        process = Process(server, tmp_path, ["-m", "tests.training.launched", str(config), worker, str(told)])
        if code := process.wait():
            assert told.exists(), process.stderr
            kinds = {kind.exit_code: kind for kind in (ConfigError, CheckpointError, NumericsError, ResourceError, LmError)}
            said = told.read_text(encoding="utf-8")
            raise Interrupted(said, code - 128) if code > 128 else kinds[code](said)

    return run


def ranks(strategy: str, devices: int = 2, context: int = 1, shard: int | None = None, tensor: int = 1) -> list[str]:
    more = [] if shard is None else [f"strategy.shard={shard}"]
    more += [] if tensor == 1 else [f"launch.tensor={tensor}"]
    return [f"strategy={strategy}", f"launch.devices={devices}", f"launch.context={context}", *more]


ZERO3 = [*ranks("zero3"), "strategy.persistence_threshold=0"]  # with small weights in slices, too
in_each_way = pytest.mark.parametrize(
    "where", [ranks("ddp"), ranks("fsdp"), ZERO3, ["trainer.micro_batch=2"]], ids=["ddp", "fsdp", "zero3", "one"]
)
"""Ranks and micro-batches that divide a step, as the argument `where`."""


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Another content of a JSON file, under a manifest that agrees."""
    (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text()))))
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()}))


@pytest.fixture
def killed(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Start a run whose rank 0 is killed right behind its n-th save."""

    def run(cfg: TrainConfig, saves: int = 1) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("LM_FAILPOINT", "renamed:kill")
            for _ in range(saves):
                with pytest.raises(ResourceError, match="rank 0: the process was killed by SIGKILL"):
                    launch(cfg)

    return run


@pytest.fixture
def goes_on_to_the_bit(killed: Callable[..., None], tmp_path: Path) -> Callable[[TrainConfig], None]:
    """Train it as "alone", and once more with a kill behind a save; what they leave is equal."""

    def check(cfg: TrainConfig) -> None:
        train_rank(cfg.replace(run=cfg.run.replace(name="alone")))
        killed(cfg)
        train_rank(cfg)
        assert results(tmp_path / "run") == results(tmp_path / "alone")

    return check


@pytest.fixture
def learns_as_one(launch: Launch, tmp_path: Path) -> Callable[..., None]:
    """Train what `make` makes in one process, and as `where` divides each step; the weights are equal, in float32."""

    def check(make: Callable[..., TrainConfig], *where: str) -> None:
        still = ("model.dropout=0", "trainer.max_steps=4", "optim=sgd", "optim.lr=0.5")
        cfg = make(*still, *where)
        (launch if cfg.launch.devices > 1 else train_rank)(cfg)
        train_rank(make(*still, "run.name=alone"))
        alone = load_file(tmp_path / "alone" / "model" / "model.safetensors")
        for name, weight in load_file(tmp_path / "run" / "model" / "model.safetensors").items():
            torch.testing.assert_close(weight, alone[name], atol=1e-5, rtol=1e-4)

    return check


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Train until a SIGTERM in the middle of a step."""

    def run(cfg: TrainConfig, step: int, micro: int = 0) -> None:
        own = TrainModule.training_step

        def struck(module: TrainModule, *args: Any) -> torch.Tensor:
            if (module.step, module.micro) == (step - 1, micro):
                os.kill(os.getpid(), signal.SIGTERM)
            return own(module, *args)

        with monkeypatch.context() as patch:
            patch.setattr(TrainModule, "training_step", struck)
            with pytest.raises(Interrupted, match=f"SIGTERM ended the run after step {step}, which is saved") as caught:
                train_rank(cfg)
        assert caught.value.exit_code == 143

    return run
