"""`lm runs`: what runs there are."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.storage import run_folder
from lm.storage.reading import parse_json
from tests.conftest import Lm

WriteRun = Callable[..., Path]


@pytest.fixture
def runs(tmp_path: Path, write_run: WriteRun) -> Path:
    """Three runs, of which b is at its fifth step and lies deeper, one that is damaged, and a folder that is none."""
    folder = tmp_path / "runs"
    write_run(folder / "c", val_bits_per_byte=1.25)
    write_run(folder / "deeper" / "b", finished=False)
    write_run(folder / "a", val_bits_per_byte=1.5)
    (write_run(folder / "torn") / "summary.json").write_text("{")
    (folder / "none").mkdir()
    checkpoint = folder / "a" / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(bytes(5000))
    for age, name in enumerate(("a", "deeper/b", "c")):
        for file in (folder / name).rglob("*"):
            os.utime(file, (1_790_000_000 - 1000 * age,) * 2)
    return folder


def test_runs_are_listed_by_age_with_figures_and_sizes(runs: Path, lm: Lm) -> None:
    code, out, err = lm("runs", "format=json")
    found = {Path(run["name"]).relative_to("runs").as_posix(): run for run in json.loads(out)}
    assert code == 0 and [*found] == ["c", "deeper/b", "a"]
    assert "left out: runs/torn/summary.json" in err
    assert (found["c"]["metric"], found["c"]["value"]) == ("val_bits_per_byte", 1.25)
    last = json.loads((runs / "deeper" / "b" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert found["deeper/b"]["state"].startswith(f"step {last:,} of ")
    assert found["a"]["state"].startswith("ended at step ") and found["a"]["checkpoint_bytes"] == 5000
    assert found["a"]["n_bytes"] == sum(file.stat().st_size for file in (runs / "a").rglob("*") if file.is_file())
    code, out, _ = lm("runs", str(runs / "a"), str(runs / "deeper"))
    lines = out.splitlines()
    assert code == 0 and lines[0].split()[::4] == ["run", "parameters", "changed"]
    assert [line.split()[0].rpartition("/")[2] for line in lines[1:3]] == ["b", "a"] and lines[3].startswith("2 runs, ")
    os.symlink(runs / "a", runs / "link")
    (runs / "deeper" / "b" / "summary.json").write_text('{"steps": 3, "parameters": "many"}')
    assert [line.split()[0] for line in lm("runs", "runs/*")[1].splitlines()[1:-1]] == ["runs/c", "runs/a", "runs/deeper/b"]
    shutil.rmtree(runs)
    code, _, err = lm("runs")
    assert code == 2 and err.splitlines()[-1] == "runs: there is no such folder, and runs lie in one. Name that of run.dir=."


@pytest.mark.parametrize(("figure", "unit"), [("val_reward", "reward"), ("val_pair_loss", "pair loss"), ("val_answer_loss", "answer loss")])
def test_a_run_is_told_by_what_it_learns(tmp_path: Path, write_run: WriteRun, lm: Lm, figure: str, unit: str) -> None:
    run = write_run(tmp_path / "run", val_bits_per_byte=1.5, **{figure: 0.25})
    assert f"0.2500 {unit}" in lm("runs", str(run))[1]


def test_a_long_log_is_read_from_its_end(runs: Path, lm: Lm) -> None:
    """With a line that a kill has torn."""
    metrics = runs / "deeper" / "b" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.writelines(f'{{"step": {step}, "loss": 1.0, "more": "{"x" * 90}"}}\n' for step in range(10_000, 30_000))
        file.write('{"step": 30000, "val_loss": 2.5}\n{"step": 300')
    _, out, _ = lm("runs", str(runs / "deeper"), "format=json")
    [found] = json.loads(out)
    assert found["state"].startswith("step 30,000") and (found["metric"], found["value"]) == ("val_loss", 2.5)


def test_of_an_ended_run_validations_alone_are_read(tmp_path: Path, write_run: WriteRun, lm: Lm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to take 22 s for 200 runs of 4,500 lines, as each line was parsed."""
    run = write_run(tmp_path / "run", val_bits_per_byte=1.5)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1000))
        file.write('{"step": 1000, "val_loss": 1.0, "val_reward": 0.75}\n')
    parsed: list[bytes] = []
    monkeypatch.setattr(run_folder, "parse_json", lambda text: (parsed.append(text), parse_json(text))[1])
    assert "0.7500 reward" in lm("runs", str(run))[1] and len(parsed) < 100
