import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.errors import CheckpointError, ResourceError
from lm.storage.run_folder import RunFolder

LINES = [{"step": 1, "loss": 2.0}, {"step": 2, "event": "spike"}, {"step": 2, "loss": float("inf")}, {"step": 3, "loss": 1.0}]


def test_metrics_come_back_without_what_is_after_the_step_or_torn_or_not_finite(tmp_path: Path) -> None:
    metrics = RunFolder(tmp_path / "run").metrics
    assert metrics.read() == []
    for line in LINES:
        metrics.append(line)
    with metrics.path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert metrics.read() == [*LINES[:2], {"step": 2, "loss": None}, LINES[3]]
    metrics.truncate(2)
    metrics.append({"step": 3, "loss": 0.5})
    assert len({id(key) for line in metrics.read() for key in line if key == "step"}) == 1  # names are held once, not a million times
    assert [line["step"] for line in metrics.read()] == [1, 2, 2, 3] and metrics.read()[-1]["loss"] == 0.5


def test_a_config_comes_back_as_it_was_frozen_however_its_parts_are_shared(tmp_path: Path) -> None:
    folder, prompts = RunFolder(tmp_path / "new" / "run"), ["é\u2028: #", "- 1e3", "\udc80", "null"]
    tree = {"z": prompts, "a": {"prompts": prompts, "lr": 1e-30, "none": None, "on": "on"}}
    assert not folder.exists()
    folder.write_config(tree)
    assert folder.exists() and folder.config() == tree and list(folder.config()) == ["z", "a"]


def test_a_run_is_unfinished_until_its_summary_is_there(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.summary() == {}
    folder.write_summary({"steps": 3})
    assert folder.summary() == {"steps": 3}
    folder.remove_summary()
    assert folder.summary() == {}


def test_of_long_samples_the_newest_are_read(tmp_path: Path) -> None:
    """Seen: over 256 MiB no report of the run, nor a comparison with it."""
    samples = RunFolder(tmp_path).samples
    for step in range(17):
        samples.append(f"## step {step}\n" + "é" * (1 << 19) + "\n")
    text = samples.read()
    assert text.startswith("## step 2\n") and text.endswith("é\n") and len(text.encode()) < 16 << 20


def test_samples_are_cut_to_a_checkpoint(tmp_path: Path) -> None:
    samples = RunFolder(tmp_path).samples
    assert samples.read() == ""
    size = samples.append("## step 1\né \udc80\n")
    samples.append("## step 2\n")
    samples.truncate(size)
    assert samples.read() == "## step 1\né \\udc80\n"


def test_the_run_around_a_model_or_a_checkpoint_is_found_and_nothing_farther(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.write_config({"seed": 0})
    for inside in (run.path, run.model, run.checkpoints / "step-00000001"):
        assert (found := RunFolder.around(inside)) is not None and found.path.absolute() == run.path
    assert RunFolder.around(run.path / "a" / "b" / "c") is None and RunFolder.around(tmp_path) is None


BOMB = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True))
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "this is a pipe or a device"),
    "an endless device": (lambda path: path.symlink_to("/dev/zero"), "this is a pipe or a device"),
    "a folder": (Path.mkdir, "cannot be read"),
    "too much": (lambda path: path.write_bytes(bytes(5 << 20)), "the file is over 4 MiB"),
    "a bomb of aliases": (lambda path: path.write_text(BOMB), "it has an alias"),
    "a mapping of code": (lambda path: path.write_text("!!python/object/apply:os.system ['true']"), "not plain yaml"),
    "a date that is none": (lambda path: path.write_text("a: 2025-13-01"), "not plain yaml"),
    "too deep": (lambda path: path.write_text("[" * 20000), "not plain yaml"),
    "a list": (lambda path: path.write_text("- 1"), "key: value pairs"),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_is_no_plain_file_of_values_is_refused_in_one_sentence(tmp_path: Path, hostile: str) -> None:
    make, words = HOSTILE[hostile]
    make(tmp_path / "config.yaml")
    with pytest.raises(CheckpointError) as caught:
        RunFolder(tmp_path).config()
    assert str(caught.value).startswith(f"{tmp_path / 'config.yaml'}: ") and words in str(caught.value) and "\n" not in str(caught.value)


def test_a_lock_that_holds_garbage_is_refused_like_any_other(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock():
        (tmp_path / "run.lock").write_bytes(b"\xff{]\nfake: error")
        with pytest.raises(ResourceError, match="in use by a process that is just starting"), RunFolder(tmp_path).lock():
            pass
