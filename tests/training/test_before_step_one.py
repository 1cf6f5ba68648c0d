"""Whatever a checkpoint, a validation or the end of a run will need is tried before step 1: nothing is trained for nothing."""

import os
from pathlib import Path

import pytest
import torch

from lm import plugins
from lm.cli.main import main
from tests.training.conftest import files_of_at_most, read, settled, write_text

NOT_UTF8 = os.fsdecode(b"b\xff.txt")
PAIRS = "".join(f'{{"source": "ab {n}", "target": "ef"}}\n' for n in range(400))
T5 = ("model=t5_tiny", "model.d_model=32", "model.n_layers=1", "model.attention.n_heads=2", "model.ffn.hidden=64", "optim=adamw")
LEARNED = ("model/position=learned",)


def refused(tiny: list[str], capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    """The exit code and last line of a training in which no step was taken, and of which nothing unfinished is left."""
    code = main(settled("train", *tiny, *more))
    folder = Path(next(given for given in tiny if given.startswith("run.dir=")).removeprefix("run.dir=")) / "run"
    assert read(folder / "metrics.jsonl") == [] and not list(folder.glob("checkpoints/*")) and not list(folder.glob("checkpoints/.*"))
    return code, capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "more, said",
    [
        ((*LEARNED, f"trainer.sample_prompts=['{'def ' * 20}']"), ("trainer.sample_prompts: ", "81 tokens", "model.max_seq_len=32")),
        ((*LEARNED, "data.seq_len=2", "trainer.sample_prompts=['def main(']"), ("trainer.sample_prompts: ", "model.max_seq_len=2")),
        (
            ("objective=mlm", "data.val_rows=1", "model=bert_tiny", "objective.mask_frac=0.001", "data.seq_len=2", *T5[1:]),
            ("0 tokens of text to predict",),
        ),
    ],
)
def test_what_a_validation_would_refuse_is_refused_before_step_1(
    tiny: list[str], capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: tuple[str, ...]
) -> None:
    code, last = refused(tiny, capsys, *more)
    assert code == 2 and all(part in last for part in said), last


def test_a_source_longer_than_the_context_is_refused_before_step_1(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(PAIRS)
    data = (
        "data=pairs",
        f"data.files={tmp_path / 'a.jsonl'}",
        "objective=seq2seq",
        "trainer.sample_prompts=['a source of more tokens than the 32 of a row']",
    )
    code, last = refused([given for given in tiny if not given.startswith(("data.files", "data=", "model"))], capsys, *T5, *LEARNED, *data)
    assert code == 2 and "trainer.sample_prompts: " in last and "model.max_seq_len=32" in last


def test_a_file_that_may_not_be_so_large_is_told_before_step_1(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with files_of_at_most(40_000):
        code, last = refused(tiny, capsys)
    assert code == 5 and "larger than one may be here (ulimit -f" in last


def test_no_room_for_checkpoints_and_the_model_is_told_before_step_1(
    tiny: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three checkpoints of 12 bytes a weight and the model of 4 take 40; there is room for 39."""
    monkeypatch.setattr("lm.storage.atomic.free_bytes", lambda path: 39 * 19_000)
    code, last = refused(tiny, capsys, "optim=adamw")
    assert code == 5 and "checkpoints: no space left" in last


@pytest.mark.parametrize("key", ["data.files", "data.cache_dir", "trainer.sample_prompts"])
def test_a_value_that_is_not_utf8_is_refused_by_its_key(tiny: list[str], capsys: pytest.CaptureFixture[str], key: str) -> None:
    code, last = refused(tiny, capsys, f"{key}='{NOT_UTF8}'" if key != "trainer.sample_prompts" else f"{key}=['{NOT_UTF8}']")
    assert code == 2 and last.startswith(key) and "must be text in UTF-8" in last and "\udcff" not in last


@pytest.mark.slow
def test_a_file_whose_name_is_not_utf8_is_trained_on_and_resumed(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / os.fsdecode(b"d\xfe")
    folder.mkdir()
    write_text(folder / NOT_UTF8)
    files = f"data.files={tmp_path}/d*/*.txt"
    assert main(settled("train", *tiny, files, "trainer.max_steps=4")) == 0
    assert main(settled("train", *tiny, files, "trainer.max_steps=8")) == 0
    assert "resumes at step 4" in capsys.readouterr().out


MARKS = "'event' marks lines of another sort"


@pytest.mark.parametrize(
    ("gives", "told"),
    [
        ("5", "numbers by name are needed"),
        ("{'mine': [1.0]}", "numbers by name are needed"),
        pytest.param("{'event': 1}", MARKS, id="seen to end with its steps in no table, logger or report"),
        ("{'mine': 2.0, 'val_loss': 1.0}", MARKS.replace("event", "val_loss")),
    ],
)
def test_a_metric_that_gives_no_numbers_of_its_own_is_told(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gives: str, told: str
) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "")  # forgotten after the test
    name = f"odd_{abs(hash(gives))}"
    lines = ["from typing import Literal", "from lm.kinds import MetricConfig", "class Odd(MetricConfig):"]
    lines += [f'    kind: Literal["{name}"] = "{name}"', f"    def build(self): return lambda trainer, module: {gives}"]
    (tmp_path / f"{name}.py").write_text("\n".join(lines))
    code = main(settled("train", *tiny, f"plugins={tmp_path / name}.py", f"+metrics.{name}={{}}"))
    last = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and last.startswith(f"metrics.{name}: ") and told in last


def test_a_metric_may_give_numbers_of_numpy(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "")  # forgotten after the test
    lines = ["from typing import Literal", "import numpy as np", "from lm.kinds import MetricConfig", "class Ofnumpy(MetricConfig):"]
    lines += ['    kind: Literal["of_numpy"] = "of_numpy"', "    def build(self): return lambda trainer, module: {'mine': np.float32(1.5)}"]
    (tmp_path / "of_numpy.py").write_text("\n".join(lines))
    assert main(settled("train", *tiny, f"plugins={tmp_path / 'of_numpy.py'}", "+metrics.of_numpy={}", "trainer.max_steps=4")) == 0
    assert {line["mine"] for line in read(tmp_path / "run/metrics.jsonl") if "loss" in line} == {1.5}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told_before_the_data_are_prepared(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(settled("train", *tiny, "trainer.device=cuda")) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("trainer.device=cuda, but torch finds no GPU here")
    assert not list((tmp_path / "cache").glob("tokens/*")) and not (tmp_path / "run").exists()


def test_what_a_mac_cannot_do_is_told(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for override, why in (
        ("strategy=fsdp", "trainer.device=mps: a Mac has one GPU, and strategy=fsdp is for several ranks. Use strategy=single."),
        ("launch.devices=2", "trainer.device=mps: a Mac has one GPU, and there are 2 ranks. Set launch.devices=1 and launch.nodes=1."),
        ("trainer.compile=true", "trainer.device=mps: trainer.compile=true is for CPUs and CUDA. Leave it out."),
        ("trainer.float8=true", "trainer.device=mps: trainer.float8=true is for CPUs and CUDA. Leave it out."),
        ("trainer.recompute=block", "trainer.recompute=block would draw anew for model.dropout=0.1, and torch cannot repeat draws there."),
        *([] if torch.backends.mps.is_available() else [("seed=0", "trainer.device=mps, but torch finds no GPU of a Mac here.")]),
    ):
        assert main(settled("train", *tiny, "trainer.device=mps", override)) == 2
        assert why in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_cpu_without_products_in_bf16_says_what_is_faster(
    tiny: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on a Xeon of that kind: a step in bf16 took 3.3 times as long as in float32."""
    said, short = "this CPU has no products in bf16, and torch imitates them", ("trainer.max_steps=1", "schedule.warmup_steps=0")
    for name, precision, has in (("none", "bf16-mixed", False), ("some", "bf16-mixed", True), ("wide", "fp32", False)):
        monkeypatch.setattr("lm.ops.precision.multiplies_bf16", lambda device, has=has: has)
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        assert main(settled("train", *tiny, *short, f"trainer.precision={precision}", f"run.name={name}")) == 0
        assert (said in capsys.readouterr().out) == (name == "none"), name
