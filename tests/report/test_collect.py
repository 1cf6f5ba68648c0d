import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lm.errors import ConfigError
from lm.report.collect import Comparison, collect
from lm.report.page import write_report
from lm.units import counted, duration, shown, si, sized
from tests.conftest import unprivileged

WriteRun = Callable[..., Path]


def write_sweep(tmp_path: Path, write_run: WriteRun, finals: dict[str, list[float]]) -> list[Path]:
    return [
        write_run(tmp_path / f"{ffn}-{seed}", seed=seed, ffn=ffn, val_bits_per_byte=final)
        for ffn, values in finals.items()
        for seed, final in enumerate(values)
    ]


def test_runs_are_grouped_over_seeds_with_mean_and_standard_error(tmp_path: Path, write_run: WriteRun) -> None:
    comparison = collect(write_sweep(tmp_path, write_run, {"gelu": [1.5, 1.6, 1.7], "relu": [1.2, 1.2, 1.5]}))
    relu, gelu = comparison.rows
    assert comparison.keys == ["model.ffn.activation"]
    assert (comparison.changes(relu), relu.seeds, gelu.seeds) == (["relu"], ["0", "1", "2"], ["0", "1", "2"])
    assert relu.mean("val_bits_per_byte") == pytest.approx(1.3)
    assert gelu.error("val_bits_per_byte") == pytest.approx(0.1 / math.sqrt(3))


def told(comparison: Comparison) -> dict[str, str]:
    """The difference by activation."""
    return {row.runs[0].config["model"]["ffn"]["activation"]: comparison.difference(row) for row in comparison.rows}


def test_seeds_are_paired_so_that_a_small_steady_difference_stands_out(tmp_path: Path, write_run: WriteRun) -> None:
    finals = {"base": [1.5, 1.6, 1.7], "steady": [1.51, 1.6101, 1.7099], "noisy": [1.62, 1.55, 1.69]}
    found = told(collect(write_sweep(tmp_path, write_run, finals)))
    assert found["base"] == "baseline"
    assert found["steady"].startswith("+0.0100 [+0.009") and found["steady"].endswith("*")
    assert found["noisy"].startswith("+0.0200 [-") and not found["noisy"].endswith("*")


def test_the_baseline_is_the_first_one_or_the_one_named(tmp_path: Path, write_run: WriteRun) -> None:
    folders = write_sweep(tmp_path, write_run, {"a": [1.5], "b": [2.5]})
    assert told(collect(folders)) == {"a": "baseline", "b": "+1.0000"}
    for name in (str(folders[1]), folders[1].name):
        assert told(collect(folders, name)) == {"a": "-1.0000", "b": "baseline"}
    with pytest.raises(ConfigError, match="baseline=c: it is none of the runs"):
        collect(folders, "c")


def test_seeds_of_their_own_are_told_apart_in_one_row(tmp_path: Path, write_run: WriteRun) -> None:
    folders = [write_run(tmp_path / str(n), seed={"init": n, "data": 0, "dropout": 0}) for n in range(2)]
    [row] = collect(folders).rows
    assert row.seeds == ["0/0/0", "1/0/0"]


def test_the_same_seed_again_is_a_row_of_its_own_and_the_same_folder_again_is_none(tmp_path: Path, write_run: WriteRun) -> None:
    first, again = write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run")
    assert [row.name for row in collect([first, again, first]).rows] == [str(first), str(again)]


def test_names_and_loggers_make_no_difference(tmp_path: Path, write_run: WriteRun) -> None:
    first, second = write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=1)
    config = second / "config.yaml"
    config.write_text(config.read_text().replace("kind: jsonl", "kind: wandb\n  project: lm").replace("~/.cache/lm", "/scratch"))
    assert collect([first, second]).keys == []


def test_seeds_of_before_and_after_trainer_deterministic_came_about_share_a_row(tmp_path: Path, write_run: WriteRun) -> None:
    """Seen to fail: two rows, with no standard error, and a column for a key that changes the last bits at most."""
    first, second = write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=1)
    config = second / "config.yaml"
    config.write_text(config.read_text().replace("trainer:\n", "trainer:\n  deterministic: true\n"))
    [row] = collect([first, second]).rows
    assert row.seeds == ["0", "1"]


def test_a_run_without_bits_per_byte_turns_the_comparison_to_the_loss(tmp_path: Path, write_run: WriteRun) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", ffn="relu")]
    metrics = folders[1] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"val_bits_per_byte"', '"unused"'))
    summary = folders[1] / "summary.json"
    summary.write_text(summary.read_text().replace('"val_bits_per_byte"', '"unused"'))
    assert collect(folders).metric == "val_loss"


def test_a_run_that_cannot_be_read_is_left_out_with_why(public: Path, write_run: WriteRun) -> None:
    """Seen to fail: one run of somebody else's ended the comparison of a folder, with the advice to free space."""
    write_run(public / "runs" / "mine")
    write_run(public / "runs" / "theirs").chmod(0)
    with unprivileged():
        comparison = collect([public / "runs"])
    assert [row.name for row in comparison.rows] == ["mine"]
    assert comparison.notes[0] == f"Left out: {public}/runs/theirs: cannot be read (Permission denied). Check the path and its permissions."


def test_a_run_that_has_not_validated_comes_last(tmp_path: Path, write_run: WriteRun) -> None:
    young = write_run(tmp_path / "young", steps=80, finished=False)
    comparison = collect([write_run(tmp_path / "old"), young])
    assert [row.name for row in comparison.rows] == ["old", "young (unfinished)"]
    assert comparison.difference(comparison.rows[1]) == "-"


def test_a_diverged_run_is_not_called_unfinished(tmp_path: Path, write_run: WriteRun) -> None:
    """Until it is resumed, which goes on behind that line or drops it."""
    lost = write_run(tmp_path / "lost", steps=80, finished=False)
    log = lost / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 41, "event": "not finite", "rows": [3]}\n')
    comparison = collect([write_run(tmp_path / "old"), lost])
    assert {row.name for row in comparison.rows} == {"old", "lost (diverged)"}
    assert "Diverged, so its newest figures before that are shown: lost." in comparison.notes
    assert "Diverged: after " in write_report(lost).read_text()
    log.write_text(log.read_text() + '{"step": 42, "loss": 3.5, "tokens": 43008}\n')
    assert "Unfinished, so its newest figures are shown: lost." in collect([lost]).notes


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"steps": 400}, r"different numbers of tokens \(410 k, 819 k\)"),
        ({"zlib_bits_per_byte": 2.5}, r"validation texts differ .*1\.9031 / 2\.5000"),
        ({"data_fingerprint": "beef" * 16}, r"different data .*aaaaaaaa, beefbeef"),
        ({"device": "NVIDIA H200"}, "Speeds are not comparable: device"),
        ({"finished": False}, r"Unfinished.*: b\."),
    ],
)
def test_an_unfair_comparison_says_why(tmp_path: Path, write_run: WriteRun, change: dict[str, object], note: str) -> None:
    a = write_run(tmp_path / "a", data_fingerprint="a" * 64)
    b = write_run(tmp_path / "b", ffn="relu", **{"data_fingerprint": "a" * 64, **change})
    fair = write_run(tmp_path / "c", ffn="relu", data_fingerprint="a" * 64)
    assert collect([a, fair]).notes == []
    assert any(re.search(note, found) for found in collect([a, b]).notes)


def test_a_tokenizer_that_is_named_otherwise_is_no_other_one(tmp_path: Path, write_run: WriteRun) -> None:
    """As by init_from, which names that of its checkpoint. Seen to be told as rows of other text."""
    folders = [write_run(tmp_path / name, data_fingerprint="a" * 64) for name in ("trunk", "branch")]
    for folder, tokenizer in zip(folders, ({"kind": "bpe", "vocab_size": 4096}, {"kind": "file", "path": "trunk"}), strict=True):
        tree = yaml.safe_load((folder / "config.yaml").read_text())
        tree["data"]["val_rows"], tree["tokenizer"] = 256, tokenizer
        (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    assert collect(folders).notes == []


def test_another_source_is_seen_without_fingerprints_too(tmp_path: Path, write_run: WriteRun) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b")]
    config = folders[1] / "config.yaml"
    config.write_text(config.read_text().replace("kind: stdlib", "kind: text\n  files: notes.txt").replace("seq_len: 256", "seq_len: 128"))
    assert collect(folders).notes == ["Unfair: the runs read different data (data.kind, data.files)."]


def test_no_folder_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        collect([])


def test_units_read_as_people_write_them() -> None:
    assert [si(x) for x in (None, 0, 7, 999.4, 999.9, 3285504, 99960, 21.2e6, 999.96e6, 1.5e12)] == [
        *("-", "0", "7", "999", "1.00 k", "3.29 M", "100 k", "21.2 M", "1.00 G", "1.50 T")
    ]
    assert [duration(x) for x in (None, 42.04, 59.96, 151.2, 3599.6, 3720)] == [
        "-",
        "42.0 s",
        "1 min 00 s",
        "2 min 31 s",
        "1 h 00 min",
        "1 h 02 min",
    ]
    assert [sized(x) for x in (0, 1, 317, 999, 1000, 999_960_000)] == ["0 bytes", "1 byte", "317 bytes", "999 bytes", "1.00 kB", "1.00 GB"]
    assert [counted(x, "row") for x in (0, 1, 2, 12345)] == ["0 rows", "1 row", "2 rows", "12,345 rows"]
    assert [shown(x) for x in (None, True, 1e-3, "a\x1b[0m", [1, 2], "y" * 50)] == [
        "null",
        "true",
        "0.001",
        "a\\u001b[0m",
        "[1, 2]",
        "y" * 39 + "…",
    ]
