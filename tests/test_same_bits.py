"""The program that compares two states of the code: what differs between two run folders is found and named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tools import same_bits
from tools.same_bits import compare


def write_run(folder: Path, tensors: dict[str, Tensor], loss: float = 2.5, speed: float = 100.0, sample: str = "def") -> Path:
    (folder / "model").mkdir(parents=True)
    save_file(tensors, folder / "model" / "model.safetensors")
    lines = [{"step": 1, "loss": 3.0, "tokens_per_second": speed}, {"step": 2, "loss": loss, "tokens_per_second": speed}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "samples.md").write_text(sample, encoding="utf-8")
    return folder


def test_runs_that_differ_in_speed_and_old_names_alone_are_equal(tmp_path: Path) -> None:
    old, new = next(iter(same_bits.NAMES.items()))
    before = write_run(tmp_path / "a", {f"{old}w": torch.ones(3), "nan": torch.tensor(torch.nan)}, speed=100.0)
    after = write_run(tmp_path / "b", {f"{new}w": torch.ones(3), "nan": torch.tensor(torch.nan)}, speed=90.0)
    assert list(map(str, compare(before, after))) == ["2/2", "2/2", "1/1"]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.5, 3.25], "w: 2 of 3 values differ, by 0.5 at most"),
        ([0.0], [-0.0], "w: 1 of 1 values differ, by 0 at most"),
        ([1.0], [1.0, 2.0], "w: torch.float32 (1,) before and torch.float32 (2,) after"),
    ],
)
def test_a_tensor_that_differs_is_named_with_its_largest_difference(
    before: list[float], after: list[float], told: str, tmp_path: Path
) -> None:
    tensors, *_ = compare(
        *(write_run(tmp_path / side, {"a": torch.ones(1), "w": torch.tensor(w)}) for side, w in (("b", before), ("c", after)))
    )
    assert (str(tensors), tensors.differing) == ("1/2", [told])


def test_a_line_a_sample_and_a_tensor_of_one_side_alone_are_named(tmp_path: Path) -> None:
    before = write_run(tmp_path / "a", {"w": torch.ones(1)})
    after = write_run(tmp_path / "b", {"w": torch.ones(1), "x": torch.ones(1)}, loss=2.75, sample="class")
    found = compare(before, after)
    assert list(map(str, found)) == ["1/2", "1/2", "0/1"]
    said = ["x: only after", "metrics.jsonl:2: loss 2.5 before and 2.75 after", "samples.md:1: 'def' before and 'class' after"]
    assert [part.differing for part in found] == [[line] for line in said]


def test_a_training_that_starts_from_another_brings_it_along() -> None:
    assert same_bits.chosen("dpo") == ["dense", "dpo"]
    with pytest.raises(SystemExit, match="only=none was given"):
        same_bits.chosen("none")
