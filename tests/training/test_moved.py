"""Runs whose data or teacher lie elsewhere by now: what is there is compared by its content."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lm.cli.compose.compose import compose_config
from lm.errors import ConfigError
from lm.training.run import train_rank
from tests.training.conftest import Configure, Stop, results, write_text

Data = Callable[[Path], list[str]]


def _one(at: Path) -> list[str]:
    return ["data=text", f"data.files={at}/text.txt"]


def _glob(at: Path) -> list[str]:
    return ["data=text", f"data.files={at}/*.txt"]


def _held_out(at: Path) -> list[str]:
    return ["data=text", f"data.files=[{at}/text.txt,{at}/other.txt]", f"data.val_files={at}/held.txt"]


def _mixed(at: Path) -> list[str]:
    sources = ",".join(f"{{name:{name},weight:1,data:{{kind:text,files:{at}/{name}.txt}}}}" for name in ("text", "other"))
    return ["data=mix", f"data.sources=[{sources}]"]


@pytest.fixture
def configure(tiny: list[str]) -> Configure:
    rest = [each for each in tiny if each != "data=text" and not each.startswith("data.files=")]
    return lambda *more: compose_config([*rest, *more])


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for seed, name in enumerate(("text", "other", "held")):
        write_text(folder / f"{name}.txt", seed=seed)
    return folder


@pytest.mark.parametrize("data", [_one, _mixed, _held_out, _glob])
def test_a_run_goes_on_with_data_that_were_moved(configure: Configure, stop: Stop, tmp_path: Path, texts: Path, data: Data) -> None:
    train_rank(configure(*data(texts), "run.name=whole"))
    stop(configure(*data(texts)), 5)
    moved = texts.rename(tmp_path / "moved")
    train_rank(configure(*data(moved)))
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_other_data_at_the_new_place_are_refused(configure: Configure, stop: Stop, tmp_path: Path, texts: Path) -> None:
    stop(configure(*_one(texts)), 5)
    moved = texts.rename(tmp_path / "moved")
    write_text(moved / "text.txt", seed=7)
    with pytest.raises(ConfigError, match=r"moved/text\.txt is not what .*texts/text\.txt was: it has changed since"):
        train_rank(configure(*_one(moved)))


@pytest.mark.parametrize("named", ["{at}/*.txt", "{at}", "{at}/text [1].txt"])
def test_a_folder_that_was_emptied_has_nothing_left(configure: Configure, stop: Stop, tmp_path: Path, named: str) -> None:
    """Seen to fail: of a pattern, and of a name that looks like one, the folder before it had to be gone as well."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    write_text(before / "text [1].txt")
    stop(configure("data=text", f"data.files='{named.format(at=before)}'"), 5)
    (before / "text [1].txt").rename(after / "text [1].txt")
    assert train_rank(configure("data=text", f"data.files='{named.format(at=after)}'"))["steps"] == 12


def test_data_that_are_still_there_are_another_choice(configure: Configure, stop: Stop, tmp_path: Path, texts: Path) -> None:
    stop(configure(*_glob(texts)), 5)
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "text.txt").write_bytes((texts / "text.txt").read_bytes())
    with pytest.raises(ConfigError, match=r"the run exists with another config \(data\.files\)"):
        train_rank(configure(*_glob(tmp_path / "copied")))


def test_a_run_that_has_ended_reads_no_data_and_so_compares_the_names(configure: Configure, tmp_path: Path, texts: Path) -> None:
    train_rank(configure(*_one(texts)))
    moved = texts.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"the run exists with another config \(data\.files\)"):
        train_rank(configure(*_one(moved)))
    assert train_rank(configure(*_one(moved), "trainer.max_steps=16", "schedule.warmup_steps=2"))["steps"] == 16


@pytest.mark.slow
def test_a_teacher_may_move_and_no_other_takes_its_place(configure: Configure, stop: Stop, tmp_path: Path, texts: Path) -> None:
    train_rank(configure(*_one(texts), "run.name=teacher"))
    train_rank(configure(*_one(texts), "run.name=other", "seed=6"))
    stop(configure(*_one(texts), f"objective.teacher={tmp_path}/teacher"), 5)
    (tmp_path / "teacher").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="not the model that the run has learned from so far"):
        train_rank(configure(*_one(texts), f"objective.teacher={tmp_path}/other"))
    with pytest.raises(ConfigError, match=r"the run exists with another config \(objective\.teacher\)"):  # seen to go on without one
        train_rank(configure(*_one(texts)))
    assert train_rank(configure(*_one(texts), f"objective.teacher={tmp_path}/moved"))["steps"] == 12


@pytest.mark.slow
def test_another_parent_does_not_take_the_place_of_one_that_is_gone(
    configure: Configure, stop: Stop, tmp_path: Path, texts: Path, tiny: list[str]
) -> None:
    """Seen to fail: the run went on, and its config, summary and model named a model that it had not begun from."""
    for seed, name in enumerate(("parent", "other")):
        train_rank(configure(*_one(texts), f"run.name={name}", f"seed={seed}"))
    rest = [each for each in tiny if not each.startswith(("model", "tokenizer", "data=", "data.files"))]
    tuned = [compose_config([*rest, *_one(texts), f"init_from={tmp_path / name}"]) for name in ("parent", "other")]
    stop(tuned[0], 5)
    (tmp_path / "parent").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"the run exists with another config \(init_from\)"):
        train_rank(tuned[1])
    assert train_rank(compose_config([*rest, *_one(texts), f"init_from={tmp_path / 'moved'}"]))["parent"] == str(tmp_path / "moved")
