"""Studies of runs of a second, and of runs that are only said to have ended."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.ablation.config import StudyConfig
from lm.ablation.runs import Job, Runs
from lm.ablation.study import Study, new_study
from lm.cli.compose.compose import compose_config
from lm.storage.atomic import atomic_folder
from lm.storage.run_folder import RunFolder
from tests.conftest import Lm
from tests.training.conftest import TINY, write_text

SHARED = [
    *(arg for arg in TINY if not arg.startswith(("run.", "trainer.max_steps", "trainer.val_every", "checkpoint."))),
    "trainer.max_steps=3",
]
Ablate = Callable[..., tuple[int, str, str]]
NewStudy = Callable[..., Study]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    return [*SHARED, f"data.files={write_text(folder / 'text.txt')}", f"data.cache_dir={folder / 'cache'}"]


@pytest.fixture
def stub(server: Path, tmp_path: Path) -> str:
    """A Python that starts by the server, without the seconds that imports take."""
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {Path(__file__).parents[1] / "client.py"} {server} "$@"\n')
    stub.chmod(0o755)
    return str(stub)


@pytest.fixture
def python(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a study are started by it."""
    monkeypatch.setattr(sys, "executable", stub)


@pytest.fixture
def ablate(lm: Lm, corpus: list[str]) -> Ablate:
    """A study of the folder `ffn` in an empty folder, unless another one is named."""

    def run(*args: str) -> tuple[int, str, str]:
        place = [] if any(arg.startswith("name=") for arg in args) else ["name=ffn"]
        return lm("ablate", *args, "dir=.", *place, "threads=1", *corpus)

    return run


@pytest.fixture
def study(corpus: list[str], tmp_path: Path) -> NewStudy:
    """The same study, of which nothing has run."""

    def make(**config: Any) -> Study:
        asked = StudyConfig(**{"overrides": corpus, "variants": {ffn: [f"model/ffn={ffn}"] for ffn in ("swiglu", "gelu")}, **config})
        variants = {name: compose_config([*asked.overrides, *own]) for name, own in asked.variants.items()}
        return new_study(tmp_path / "ffn", asked, variants)

    return make


def end(runs: Runs, job: Job, value: float) -> None:
    """Leaves what a run leaves that has ended with this metric."""
    folder = RunFolder(runs.folder / job.name)
    folder.write_config(job.config.tree())
    folder.write_summary({"steps": 3, job.metric: value})
    with atomic_folder(folder.model) as model:
        (model / "weights").write_text("none")
