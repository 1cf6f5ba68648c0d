import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.cli.compose import catalog
from lm.cli.compose.compose import compose
from lm.storage.model_folder import save_model


@pytest.fixture
def default_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, entered, with the final model of the default recipe in it as far as a config needs it, for every recipe that
    starts from another one's."""
    monkeypatch.chdir(tmp_path)
    config = compose([]).config()
    folder = Path(config.run.dir) / config.run.name
    parents = {catalog.values("recipes", recipe).get("init_from") for recipe in catalog.groups()["recipes"]} - {None}
    for parent in {str(folder), *parents}:
        save_model(Path(parent) / "model", config.model.tree(), {}, lambda temporary: None, {})
    return folder


@pytest.fixture
def lm_process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line as a process of its own, in an empty folder."""

    def run(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", "lm", *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
        )

    return run
