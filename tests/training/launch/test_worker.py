from pathlib import Path

import pytest
import yaml

from lm.errors import ConfigError
from lm.training import worker
from lm.training.launch.start import train
from lm.training.run import train_rank
from lm.training.worker import main
from tests.runs import older
from tests.training.conftest import Configure, ranks, results


def test_a_frozen_config_trained_again_gives_the_same_run(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure())
    tree = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    tree["run"]["name"] = "again"
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(older(tree)))
    assert main([str(tmp_path / "again.yaml")]) == 0
    assert results(tmp_path / "again") == results(tmp_path / "run")


@pytest.mark.parametrize("content", ["!!python/object/apply:os.system ['touch canary']", "model: [", "just text", "mdel: 1"])
def test_a_config_that_is_none_is_refused_and_runs_nothing(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail, its canary made, with yaml's unsafe loader."""
    (tmp_path / "bad.yaml").write_text(content)
    assert main([str(tmp_path / "bad.yaml")]) == 2
    assert "bad.yaml" in capsys.readouterr().err.splitlines()[-1]
    assert not Path("canary").exists()


@pytest.mark.parametrize("world", ["1", "4"])
def test_another_number_of_ranks_than_the_config_has_is_refused(
    world: str, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen to be told as an internal error, after the data were prepared."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": world, "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(configure(*ranks("ddp")).tree()))
    assert main([str(tmp_path / "two.yaml")]) == 2
    assert f"launch: {world} ranks were started, and the config has nodes=1 x devices=2" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_torchrun_is_left_to_the_worker(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to start all ranks in each of torchrun's processes, which were then told that the run is in use by another of them."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ConfigError, match="torchrun has started this process, and lm train starts its ranks itself"):
        train(configure(*ranks("ddp")))
    assert not (tmp_path / "run").exists()


def test_a_timeout_is_told_however_gloo_says_it(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen, where ranks waited in several exchanges: 'internal error ... report it', in place of the rank that was silent."""

    def wait(*args: object) -> None:
        raise RuntimeError("Application timeout caused pair closure")

    monkeypatch.setattr(worker, "train_rank", wait)
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(configure().tree()))
    assert main([str(tmp_path / "one.yaml")]) == 1
    assert "another rank did not answer within launch.timeout_s=" in capsys.readouterr().err.splitlines()[-1]
