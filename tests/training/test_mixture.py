"""A run on a mixture: killed and resumed it reads the same rows, and says of which source how much."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lm.cli.compose.compose import compose_config
from lm.errors import ConfigError
from lm.report.page import write_report
from lm.training.module import TrainModule
from lm.training.run import train_rank
from tests.server import Process
from tests.training.conftest import read, results, settled, write_text

STEPS, ROWS, SEQ_LEN = 20, 8, 32
LmProcess = Callable[..., Process]


@pytest.fixture
def mixed(tiny: list[str], tmp_path: Path) -> list[str]:
    """Overrides for two sources and one that is only validated; source a is read at most once, b until its third epoch and further."""
    files = {name: write_text(tmp_path / f"{name}.txt", lines, seed=lines) for name, lines in (("a", 60), ("b", 21), ("held", 40))}
    options = {"a": "weight:2.0,max_epochs:1.0", "b": "weight:1.0", "held": "weight:0.0"}
    sources = ",".join(f"{{name:{name},data:{{kind:text,files:{path}}},{options[name]}}}" for name, path in files.items())
    own = [arg for arg in tiny if not arg.startswith(("data=", "data.files=", "trainer.max_steps="))]
    return [*own, "data=mix", f"data.sources=[{sources}]", f"trainer.max_steps={STEPS}"]


@pytest.mark.slow
def test_a_killed_run_on_a_mixture_is_bitwise_the_run_left_alone_and_so_is_what_it_read(
    mixed: list[str], lm_process: LmProcess, tmp_path: Path
) -> None:
    """Seen to fail with the order begun anew."""
    train_rank(compose_config([*mixed, "run.name=whole"]))
    process = lm_process("train", *mixed)
    wait_for(tmp_path / "run" / "metrics.jsonl", 10)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert lm_process("train", *mixed).wait() == 0
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["tokens/a"] + line["tokens/b"] == line["tokens"] == line["step"] * ROWS * SEQ_LEN for line in lines)
    assert lines[-1]["epochs/a"] == 1.0 and lines[-1]["epochs/b"] > 2.0 and "tokens/held" not in lines[-1]


def test_a_run_that_its_sources_do_not_last_is_refused_before_its_first_step(mixed: list[str], tmp_path: Path) -> None:
    """Seen to fail: it was trained until its rows had come to an end, and the steps since its last checkpoint were lost."""
    short = [arg.replace("weight:1.0", "weight:1.0,max_epochs:1.0") for arg in mixed if not arg.startswith("trainer.max_steps=")]
    with pytest.raises(
        ConfigError, match=r"data\.sources: after \d+ rows every source has reached its max_epochs, and row 160 is asked for"
    ):
        train_rank(compose_config([*short, f"trainer.max_steps={STEPS}"]))
    assert not (tmp_path / "run").exists()
    train_rank(compose_config([*short, "trainer.max_steps=2", "schedule.warmup_steps=1"]))
    before = results(tmp_path / "run"), (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="and row 160 is asked for"):
        train_rank(compose_config([*short, f"trainer.max_steps={STEPS}", "schedule.warmup_steps=1"]))
    assert (results(tmp_path / "run"), (tmp_path / "run" / "config.yaml").read_text()) == before


def test_sources_of_pairs_have_the_tokens_of_both_texts(tiny: list[str], tmp_path: Path) -> None:
    """Seen to fail: they had half of the run's tokens together."""
    for name in "ab":
        lines = [json.dumps({"prompt": f"{name}{i}", "chosen": "yes", "rejected": "no"}) for i in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    each = [f"{{name:{name},data:{{kind:text,files:{tmp_path}/{name}.jsonl,record:{{kind:preference}}}}}}" for name in "ab"]
    own = [arg for arg in tiny if not arg.startswith(("data=", "data.files="))]
    train_rank(compose_config([*own, "data=mix", f"data.sources=[{','.join(each)}]", "objective=simpo"]))
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert lines and all(line["tokens/a"] + line["tokens/b"] == line["tokens"] for line in lines)


def wait_for(metrics: Path, step: int) -> None:
    """Until the run has logged this step."""
    until = time.monotonic() + 60
    while not (metrics.exists() and any(line["step"] >= step for line in read(metrics))):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_the_report_and_the_summary_show_what_was_read_of_each_source(mixed: list[str], tmp_path: Path) -> None:
    """Seen to fail with rows told as tokens."""
    summary = train_rank(compose_config(mixed))
    assert summary["tokens/a"] + summary["tokens/b"] == summary["tokens"] and summary["epochs/a"] == 1.0
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    table = page[page.index("<h2>Sources</h2>") :]
    read_of_a = summary["tokens/a"]
    share = read_of_a / summary["tokens"]
    assert f'<th scope="row">a</th><td>{summary["tokens/a"] / 1000:.2f} k</td><td>{share:.1%}</td><td>1.00</td>' in table
    assert '<th scope="row">held</th><td>0</td><td>0.0%</td><td>0.00</td>' in table


def test_of_sources_that_changed_only_the_keys_in_them_are_told(mixed: list[str], tmp_path: Path) -> None:
    """Seen to fail: all sources as JSON, twice."""
    train_rank(compose_config([*mixed[:-1], "trainer.max_steps=5"]))
    with pytest.raises(ConfigError) as caught:
        train_rank(compose_config([arg.replace("weight:2.0", "weight:4.0") for arg in [*mixed[:-1], "trainer.max_steps=5"]]))
    assert caught.value.before == ["  data.sources.0.weight: 2.0 in the run, 4.0 now"]


def test_phases_that_a_rollback_has_come_to_may_not_change(mixed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 12 after one from 11 to 8, which has read the rows of 15 steps. Seen to be taken, and tokens/a fell from 192 to 0."""
    own = TrainModule.loss

    def loss(module: TrainModule) -> torch.Tensor:
        return own(module) * (10 if module.step == 11 and not module.run.counters.rolled_back else 1)

    monkeypatch.setattr(TrainModule, "loss", loss)
    given = [*mixed[:-1], "schedule=constant", "optim=adamw", "numerics.rollbacks=1", "checkpoint.every=4", "trainer.log_every=1"]

    def until(*steps: int) -> str:
        return f"data.phases=[{','.join(f'{{until_step:{step},weights:{{b:{step}.0,a:1.0}}}}' for step in steps)}]"

    train_rank(compose_config(settled(*given, until(14, 16), "trainer.max_steps=12")))
    with pytest.raises(ConfigError, match=r"another config \(data\.phases\)"):
        train_rank(compose_config(settled(*given, until(13, 16), "trainer.max_steps=13")))
    with pytest.raises(ConfigError, match=r"another config \(data\.phases\)"):
        train_rank(compose_config(settled(*given, until(14), "trainer.max_steps=13")))  # step 15 was in the second
    train_rank(compose_config(settled(*given, until(14, 16, 18), "trainer.max_steps=13")))
