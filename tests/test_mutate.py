"""The program that plants faults: each can be planted in the source as it is now."""

import re
from pathlib import Path

import pytest

from tools import mutate


def test_every_fault_can_be_planted_and_its_tests_are_there() -> None:
    assert len(mutate.MUTATIONS) >= 86
    assert mutate.misplaced() == []


def test_a_fault_whose_text_is_gone_or_whose_tests_are_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    what, file, before, after, tests = mutate.MUTATIONS[0]
    gone, missing = (what, file, f"{before} # gone", after, tests), (what, file, before, after, ["nn/none.py::x"])
    monkeypatch.setattr(mutate, "MUTATIONS", [mutate.MUTATIONS[0], gone, missing])
    told = mutate.misplaced()
    assert told[0].startswith(f"fault 2: {file} holds the text 0 times, not once: ")
    assert told[1:] == ["fault 3: there is no tests/nn/none.py::x"]
    with pytest.raises(SystemExit, match="fault 2"):
        mutate.main(["only=1"])


def test_the_page_of_results_tells_how_many_faults_there_are_and_where() -> None:
    """Seen to fail: it told of a room without any."""
    told = re.search(r"plants (\d+) one-line faults in (.*), for the suite", Path("docs/results.md").read_text(encoding="utf-8"))
    assert told is not None and int(told[1]) == len(mutate.MUTATIONS)
    assert set(re.findall(r"`lm/(\w+)/`", told[2])) == {file.split("/")[0] for _, file, *_ in mutate.MUTATIONS}


def test_a_fault_changes_its_line() -> None:
    assert [what for what, _, before, after, _ in mutate.MUTATIONS if before == after] == []


@pytest.mark.parametrize(("text", "numbers"), [("3", [3]), ("3,7-9", [3, 7, 8, 9])])
def test_faults_are_chosen_by_number(text: str, numbers: list[int]) -> None:
    assert mutate.numbers_in(text) == numbers


@pytest.mark.parametrize("args", ["only=0", "only=999", "only=7-3", "only=a", "only=1,,2", "only=1-2-3"])
def test_faults_that_there_are_not_are_refused(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        mutate.main([args])
    assert ended.value.code == 2 and "was given. Write numbers from 1 to" in capsys.readouterr().err
