import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from lm.training.run import train_rank
from tests.training.conftest import Before, Configure, Launch, ranks, results


def test_recorded_steps_are_told(configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two micro-batches each; the steps 4 to 6."""
    train_rank(configure("trainer.profile=3", "trainer.micro_batch=4", "trainer.val_every=100"))
    out, err = capsys.readouterr()
    assert "USDT" not in err and re.search(r"profile: steps 4 to 6, [\d.e-]+ s each", out)
    table = (tmp_path / "run" / "profile" / "rank-0.txt").read_text().splitlines()
    calls = {line.split(" x  ")[1]: int(line.split("%")[1].split(" x ")[0].replace(",", "")) for line in table[2:]}
    assert calls["aten::_scaled_dot_product_flash_attention_for_cpu"] == 2  # a step: one of each micro-batch
    parts = [float(part) for line in table[2:] for part in re.findall(r"([\d.]+)%", line)]
    assert 50 < sum(parts) <= 100.5 and parts == sorted(parts, reverse=True)
    seconds = float(re.findall(r"6, ([\d.e-]+) s each", table[0])[0])
    assert 0 < sum(float(line.split(" ms")[0]) for line in table[2:]) <= 1e3 * seconds  # of a step
    assert "\n".join(table[1:6]) in out
    trace = json.loads(gzip.decompress((tmp_path / "run" / "profile" / "rank-0.json.gz").read_bytes()))
    assert sum(each.get("name") == "aten::_scaled_dot_product_flash_attention_for_cpu" for each in trace["traceEvents"]) == 6


@pytest.mark.slow
def test_what_comes_behind_the_step_before_is_not_recorded(configure: Configure, tmp_path: Path) -> None:
    """Seen to fail: a validation, samples and a save at step 3 were the most of what step 4 was told to take."""
    given = ("trainer.val_every=3", "checkpoint.every=3", "trainer.sample_prompts=[def]")
    train_rank(configure("trainer.profile=1", "trainer.micro_batch=8", *given))
    table = (tmp_path / "run" / "profile" / "rank-0.txt").read_text()
    assert re.findall(r"(\d+) x  aten::_scaled_dot_product_flash_attention_for_cpu\n", table) == ["1"]


def test_what_is_recorded_is_the_run_left_alone(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure("run.name=plain"))
    train_rank(configure("trainer.profile=3"))
    assert results(tmp_path / "run") == results(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "said"),
    [(3, "nothing was recorded, as fewer than 4 steps were left"), (4, "profile: step 4, "), (5, "profile: steps 4 to 5, ")],
)
def test_a_run_may_end_before(configure: Configure, capsys: pytest.CaptureFixture[str], steps: int, said: str) -> None:
    train_rank(configure("trainer.profile=3", f"trainer.max_steps={steps}"))
    assert said in capsys.readouterr().out


def test_where_it_cannot_be_written_the_run_goes_on(configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("")
    assert train_rank(configure("trainer.profile=1"))["steps"] == 12
    assert "profile: not written (" in capsys.readouterr().out


@pytest.mark.slow
def test_every_rank_records_its_own(configure: Configure, launch: Launch, tmp_path: Path) -> None:
    launch(configure(*ranks("ddp"), "trainer.profile=2"))
    assert sorted(path.name for path in (tmp_path / "run" / "profile").glob("*.gz")) == ["rank-0.json.gz", "rank-1.json.gz"]


def test_an_error_ends_the_recording(configure: Configure) -> None:
    """Else what a notebook does next would be recorded on."""
    with pytest.raises(ZeroDivisionError):
        train_rank(configure("trainer.profile=5"), callbacks=[Before(6, lambda module: 1 / 0)])
    assert not torch.autograd._profiler_enabled()
