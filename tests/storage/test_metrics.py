"""metrics.jsonl: what is written, what is read back, and what a kill or a full disk leaves of it."""

import json
import logging
import shutil
import tracemalloc
from pathlib import Path

import pytest

from lm.errors import CheckpointError, ResourceError
from lm.storage.run_folder import Metrics


def test_records_read_back_in_order(tmp_path: Path) -> None:
    file = Metrics(tmp_path / "metrics.jsonl")
    records = [{"step": 1, "loss": 2.5}, {"step": 1, "val_loss": 2.25}, {"step": 2, "event": "spike é", "rows": [1, 2]}]
    for record in records:
        file.append(record)
    assert Metrics(tmp_path / "metrics.jsonl").read() == records


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_null_and_the_line_is_valid_json(value: float, tmp_path: Path) -> None:
    Metrics(tmp_path / "m").append({"step": 1, "loss": value, "nested": {"a": [value, 1.5]}})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads((tmp_path / "m").read_text(), parse_constant=refuse)
    assert found == {"step": 1, "loss": None, "nested": {"a": [None, 1.5]}}


def test_truncate_drops_what_a_resumed_run_writes_again(tmp_path: Path) -> None:
    path = tmp_path / "m"
    file = Metrics(path)
    for step in range(1, 6):
        file.append({"step": step})
    resumed = Metrics(path)
    resumed.truncate(3)
    resumed.append({"step": 4, "again": True})
    assert Metrics(path).read() == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": True}]


@pytest.mark.parametrize(("step", "kept"), [(8, [4, 8, 8, 8]), (16, [4, 8, 8, 8, 12, 16])])
def test_a_rollback_that_was_told_twice_does_not_take_away_what_came_later(tmp_path: Path, step: int, kept: list[int]) -> None:
    """Seen to fail: a run killed between a rollback and a save told of it twice once; resumed much later, it lost all records since."""
    file, back = Metrics(tmp_path / "m"), {"step": 8, "event": "rolled back"}
    for record in ({"step": 4}, {"step": 8}, back, back, {"step": 12}, {"step": 16}, {"step": 16, "event": "rolled back"}, {"step": 20}):
        file.append(record)
    file.truncate(step, rollbacks=1 if step == 16 else 2)
    assert [record["step"] for record in Metrics(tmp_path / "m").read()] == kept
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_truncate_holds_one_line_at_a_time(tmp_path: Path) -> None:
    """A resume after 2 million steps took 1 GB for it."""
    path = tmp_path / "m"
    path.write_text("".join(json.dumps({"step": step, "text": "x" * 1000}) + "\n" for step in range(4000)))
    tracemalloc.start()
    Metrics(path).truncate(3000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(Metrics(path).read()) == 3001 and most < 1e6 < path.stat().st_size


def test_every_cut_of_the_last_line_is_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "m"
    first, last = b'{"step": 1}\n', '{"step": 12, "text": "é"}\n'.encode()
    for cut in range(len(last)):
        path.write_bytes(first + last[:cut])
        complete = cut == len(last) - 1  # only the newline is gone
        assert Metrics(path).read() == [{"step": 1}] + ([{"step": 12, "text": "é"}] if complete else [])
        Metrics(path).truncate(1)
        assert path.read_bytes() == first


def test_truncate_starts_a_file_where_there_is_none(tmp_path: Path) -> None:
    Metrics(tmp_path / "m").truncate(0)
    assert Metrics(tmp_path / "m").read() == []


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1}', '{"step": "1"}', "\x00"])
def test_a_broken_line_within_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(CheckpointError, match="m:2: "):
        Metrics(path).read()


def test_deletion_mid_run_goes_on_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run" / "m"
    file = Metrics(path)
    with caplog.at_level(logging.WARNING):
        file.append({"step": 1})
        file.append({"step": 2})
        assert caplog.records == []
        path.unlink()
        file.append({"step": 3})
        file.append({"step": 4})
        assert len(caplog.records) == 1
        assert str(path) in caplog.text
        shutil.rmtree(tmp_path / "run")
        file.append({"step": 5})
    assert Metrics(path).read() == [{"step": 5}]


def test_a_file_that_cannot_be_written_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        Metrics(tmp_path / "file" / "m").append({"step": 1})
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(ResourceError, match="full: no space left"):
        Metrics(tmp_path / "full").append({"step": 1})
