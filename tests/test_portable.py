"""What is said on machines that are not like ours."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import findings

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_a_python_that_is_too_old_is_told_before_an_environment_is_made_of_it(tmp_path: Path) -> None:
    """As macOS and Ubuntu 22.04 have by the name of python3; the environment would stay theirs, whatever PYTHON is named later."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "python3"
    old.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.version_info = (3, 9, 6); exec(sys.argv[1])" "$2"\n', encoding="utf-8"
    )
    old.chmod(0o755)
    done = subprocess.run(["make", ".venv/ready", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    told = f"PYTHON: {old} is Python 3.9, and 3.11 or newer is needed. Name one, as in make PYTHON=python3.12.\n"
    assert done.returncode and done.stderr.startswith(told) and not (tmp_path / ".venv").exists()


def test_windows_is_told_to_use_wsl2() -> None:
    """Not that a module named fcntl is missing, as an internal error to be reported."""
    done = subprocess.run([sys.executable, "-c", "import os; os.name = 'nt'; import lm"], cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: lm: Windows has no locks") and last.endswith("Run it in WSL2, which is a Linux.")


def test_findings_are_told_where_the_system_does_not_name_its_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As macOS, which has no /proc, and Linux on ARM, whose list has no names."""
    for text in (None, "processor\t: 0\nBogoMIPS\t: 50.00\n", "model name\t: A: 1\n"):
        if text is not None:
            (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
        monkeypatch.setattr(findings, "Path", lambda name: tmp_path / "cpuinfo")
        assert findings.processor() == ("A: 1" if text and "model" in text else "CPU")
