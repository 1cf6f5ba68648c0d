"""tools/faults.py names a test for every fault that a run must survive, and finds out where a name is wrong."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = {"K": 12, "R": 12, "D": 19, "C": 7, "N": 5, "P": 6, "L": 3, "S": 7}  # faults by the letter of their ids


def run(*args: str, program: str | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *(["-c", program] if program else [str(ROOT / "tools" / "faults.py")]), *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_fault_is_listed_once() -> None:
    ids = [line.split()[0] for line in run("--list").stdout.splitlines()]
    assert len(ids) == len(set(ids)) == sum(ROWS.values())
    assert Counter(name[0] for name in ids) == ROWS


def test_every_fault_names_tests_that_exist() -> None:
    shown = "print(json.dumps([name for _, names in faults.REGISTRY.values() for name in names]))"
    names = json.loads(run(program=f"import sys, json; sys.path.insert(0, 'tools'); import faults; {shown}").stdout)
    assert len(names) > 100
    for name in names:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), name


@pytest.mark.slow
def test_a_name_that_no_test_has_is_an_error_before_any_test_runs() -> None:
    plant = "faults.REGISTRY['S9'][1].append('tests/storage/test_atomic.py::test_that_is_not_there')"
    program = f"import sys; sys.path.insert(0, 'tools'); import faults; {plant}; sys.exit(faults.main())"
    done = run("--only", "S9", program=program)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("error: no test is called tests/storage/test_atomic.py::test_that_is_not_there")
    assert "passed" not in done.stderr


@pytest.mark.slow
def test_a_fault_whose_tests_pass_is_survived() -> None:
    done = run("--only", "S9")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"survived": 1, "total": 1, "not survived": {}})
