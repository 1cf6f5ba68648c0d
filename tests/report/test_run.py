import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from lm.errors import CheckpointError, ConfigError
from lm.report.collect import differing
from lm.report.run import Axis, Run, read_run
from lm.schema import flatten
from lm.storage.run_folder import RunFolder

WriteRun = Callable[..., Path]


def test_flatten_joins_keys_and_keeps_lists_and_empty_trees_as_leaves() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [{"x": 2}]}, "e": {}, "f": None}) == {"a.b.c": 1, "a.d": [{"x": 2}], "e": {}, "f": None}


def test_differing_tells_an_absent_key_from_null() -> None:
    assert differing([{"a": 1, "b": None, "c": [1]}, {"a": 1, "c": [1]}, {"a": 1, "c": [1]}]) == ["b"]
    assert differing([{"a": 1}, {"a": 1, "z": 0}, {"a": 2}]) == ["a", "z"]


def test_series_leaves_out_events_and_values_that_are_not_finite(tmp_path: Path, write_run: WriteRun) -> None:
    folder = write_run(tmp_path / "a", steps=20)
    lines = [{"step": 30, "tokens": 9, "loss": None}, {"step": 31, "event": "spike", "loss": 5.0}, {"step": 40, "loss": 2.0}]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    run = read_run(folder)
    assert run.series("loss")[0] == [10, 20, 40]
    assert run.series("loss", "tokens")[0] == [20480, 40960]
    assert [event["event"] for event in run.events] == ["spike"]


def test_the_time_of_training_is_summed_in_one_pass_over_the_lines() -> None:
    """Seen to fail: every validation went over all lines, and 20,000 lines with 2,000 validations took 45 s. A line before the one before
    it, as two writers leave it, takes no time, and a step between two lines its part."""
    asked = []

    class Line(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.append(key)
            return super().get(key, default)

    lines = [Line({"step": 10 * i, "step_s": 0.5 if i % 2 else 0.25, "loss": 1.0, "val_loss": 1.0}) for i in range(1, 101)]
    run = Run(Path("a"), "a", {}, [*lines[:2], Line({"step": 15, "val_loss": 2.0}), Line({"step": 4, "step_s": 9.0}), *lines[2:]], {}, "")
    seconds, losses = run.series("val_loss", "time")
    assert dict(zip(seconds, losses, strict=True))[6.25] == 2.0 and seconds[0] == 5.0 and seconds[-1] == 375.0
    assert asked.count("step_s") <= 2 * len(lines) + 10


@pytest.mark.parametrize("model_step", [None, 20])
def test_a_run_without_its_lines_of_training_tells_the_same(tmp_path: Path, write_run: WriteRun, model_step: int | None) -> None:
    """40 runs of 20,000 lines took 500 MB, and 50 take 80 as they are compared."""
    folder = write_run(tmp_path / "a", steps=30, **({"finished": False} if model_step is None else {"model_step": model_step}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "loss": 1.0, f"of/{step}": step, "mfu_pct": step}) + "\n" for step in range(31, 61))
        file.write(json.dumps({"step": 55, "tokens": 1, "val_loss": 2.0, "val_bits_per_byte": 1.0}) + "\n")
        file.write(json.dumps({"step": 56, "event": "spike", "loss": 5.0}) + "\n")
    read = read_run(folder)
    whole = replace(read, metrics=RunFolder(folder).metrics.read(), trained={})
    for x in get_args(Axis):
        thin = read.thinned(x)
        for key in ("val_loss", "val_bits_per_byte"):
            assert thin.points(key, x) == read.points(key, x) == whole.points(key, x)
            assert whole.points(key, x) or (x == "flops" and not whole.finished)
        for key in ("loss", "lr", "mfu_pct", "of/40"):
            assert read.points(key, x) == whole.points(key, x) and read.series(key, x) == whole.series(key, x)
        assert {key: thin.number(key) for line in whole.metrics for key in line} == {
            key: whole.number(key) for line in whole.metrics for key in line
        }
        assert thin.events == read.events == whole.events != []


def test_lines_of_training_take_eight_bytes_a_figure(tmp_path: Path) -> None:
    """Seen to fail: a million lines took 970 MiB in the report of their run, and 790 as it was compared. Of two lines of the same step,
    as two writers leave them, the last one counts."""
    lines = [{"step": step, "tokens": step, "loss": 1 / step, "lr": None} for step in (*range(1, 1001), 900, 1001)]
    lines[-2]["loss"] = 7.0
    run = Run(tmp_path, "a", {}, [], {}, "").with_lines(iter(lines))
    assert run.metrics == lines[-1:]
    assert sum(values.itemsize * len(values) for values in run.trained.values()) == len(lines) * 8 * 5
    steps, losses = run.series("loss", "tokens")
    assert steps == [*range(1, 1002)] and losses[899] == 7.0 and losses[-1] == 1 / 1001
    assert run.series("lr") == ([], [])


def test_number_prefers_the_summary_and_falls_back_to_the_newest_line(tmp_path: Path, write_run: WriteRun) -> None:
    finished = read_run(write_run(tmp_path / "a", val_loss=1.25))
    unfinished = read_run(write_run(tmp_path / "b", finished=False))
    assert finished.number("val_loss") == 1.25 and finished.finished
    assert unfinished.number("val_loss") == unfinished.series("val_loss")[1][-1] and not unfinished.finished
    assert unfinished.number("parameters") is None
    assert replace(unfinished, metrics=[*unfinished.metrics, {"step": 110, "val_loss": None}]).number("val_loss") is None


def test_figures_of_the_metrics_are_of_the_model_that_was_handed_on(tmp_path: Path, write_run: WriteRun) -> None:
    """Seen to fail: the loss of the best validation stood beside the accuracy of the last one."""
    folder = write_run(tmp_path / "a", steps=30, model_step=20)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "val_accuracy": step / 100}) + "\n" for step in (10, 20, 30))
    assert read_run(folder).number("val_accuracy") == 0.2
    assert read_run(write_run(tmp_path / "b")).number("val_accuracy") is None


@pytest.mark.parametrize("torn", ['{"step": 21, "lo', '{"step"', "12", "\x00\x00"])
def test_a_torn_last_line_is_left_out(tmp_path: Path, write_run: WriteRun, torn: str) -> None:
    folder = write_run(tmp_path / "a", steps=20)
    whole = read_run(folder).metrics
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert read_run(folder).metrics == whole


def test_a_complete_last_line_without_newline_counts(tmp_path: Path, write_run: WriteRun) -> None:
    folder = write_run(tmp_path / "a", steps=20)
    whole = read_run(folder).metrics
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text().rstrip("\n"))
    assert read_run(folder).metrics == whole


@pytest.mark.parametrize("broken", ['{"step": 1', "[1, 2]", "word"])
def test_a_broken_line_among_others_is_named_by_file_and_line(tmp_path: Path, write_run: WriteRun, broken: str) -> None:
    folder = write_run(tmp_path / "a", steps=30)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], broken, *lines[1:]]) + "\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2: "):
        read_run(folder)


def test_a_misspelt_folder_is_answered_with_the_nearest_run(tmp_path: Path, write_run: WriteRun) -> None:
    write_run(tmp_path / "tiny_muon")
    with pytest.raises(ConfigError, match=r"tiny_moun: .*Did you mean .*tiny_muon\?"):
        read_run(tmp_path / "tiny_moun")
    with pytest.raises(ConfigError, match="no such run folder"):
        read_run(tmp_path / ("x" * 300))


def test_a_folder_without_config_or_without_metrics_is_refused_by_name(tmp_path: Path, write_run: WriteRun) -> None:
    for name, file, left in (("a", "config.yaml", None), ("b", "metrics.jsonl", None), ("c", "metrics.jsonl", "")):
        folder = write_run(tmp_path / name)
        (folder / file).unlink()
        if left is not None:
            (folder / file).write_text(left)
        with pytest.raises(ConfigError, match=rf"{folder}: {file}"):
            read_run(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", b"!!python/object/apply:os.system ['touch canary']"),
        ("config.yaml", b"a: [1"),
        ("config.yaml", b"- 1"),
        ("summary.json", b'{"name": '),
        ("samples.md", b"caf\xe9"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, write_run: WriteRun, file: str, content: bytes) -> None:
    folder = write_run(tmp_path / "a", steps=50)
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{folder / file}: "):
        read_run(folder)
