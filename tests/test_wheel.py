"""An installed wheel, in an environment of its own, far from the checkout."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_an_installed_wheel_trains_from_any_folder(tmp_path: Path) -> None:
    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path / "dist", ROOT)
    [wheel] = (tmp_path / "dist").glob("slotlm-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"lm/py.typed", "lm/cli/listing/keys.json", "lm/conf/train.yaml", "lm/recipes/pretrain/tiny.yaml"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "tools/", "conf/", "recipes/"))]

    venv.create(tmp_path / "env", with_pip=True)
    run(tmp_path / "env/bin/python", "-m", "pip", "install", "-c", ROOT / "constraints.txt", wheel)
    out = run(tmp_path / "env/bin/lm", "train", "debug=fast", "model=nano", "tokenizer=bytes", "data.cache_dir=cache")
    assert "report: runs/" in out
    assert list(tmp_path.glob("runs/*/model/model.safetensors"))
