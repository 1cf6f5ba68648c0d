"""What tools/abuse.py calls wrong, and that its cases are those of their seed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.abuse import drawn, wrong
from tools.abuse_cases import Case, data, environments, overrides

ROOT = Path(__file__).parents[1]
GOOD = "progress\noptim.lrr: there is no such key. Did you mean 'lr'?\n"


@pytest.mark.parametrize(
    ("code", "stopped", "err", "expected"),
    [
        (2, False, GOOD, ""),
        (0, False, "", ""),
        (143, True, GOOD, ""),
        (143, False, GOOD, "exit code 143"),
        (1, False, GOOD, "exit code 1"),
        (-9, True, GOOD, "exit code -9, after it was asked to stop"),
        (2, False, "", "the last line is no sentence"),
        (2, False, "x.txt: cannot be\nread", "the last line is no sentence"),
        (2, False, f"{'x ' * 2000}.", "the last line is no sentence"),
        (2, False, "Traceback (most recent call last):\n ...\nx: is bad.", "an error of ours"),
        (2, False, "\x1b[31mx: is bad.", "a control character"),
        (0, False, "x \u202e y", "a control character"),
    ],
)
def test_what_ends_wrongly_is_told(code: int, stopped: bool, err: str, expected: str, tmp_path: Path) -> None:
    assert wrong(Case("any", ["train"]), code, stopped, "", err, tmp_path) == expected


def test_what_is_half_written_or_read_in_silence_is_told(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    assert wrong(Case("any", []), 2, False, "", GOOD, tmp_path) == "made, although it failed"
    assert wrong(Case("any", [], refused=True), 0, False, "", "", tmp_path) == "a changed weight is read"
    assert wrong(Case("any", ["format=json"]), 0, False, '{"val_loss": NaN}', "", tmp_path) == "a figure that is no number"
    (tmp_path / "x" / ".tmp-made-1").mkdir(parents=True)
    assert wrong(Case("any", []), 0, False, "", "", tmp_path) == "half written: x/.tmp-made-1"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param(overrides, marks=pytest.mark.slow), pytest.param(data, marks=pytest.mark.slow), environments]
)
def test_cases_are_those_of_their_seed(strategy: object) -> None:
    assert callable(strategy)
    first, again, other = (drawn(strategy(), 8, seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.slow
def test_sixty_hostile_cases_end_as_they_must() -> None:
    done = subprocess.run([sys.executable, "tools/abuse.py", "cases=60", "seed=7"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
