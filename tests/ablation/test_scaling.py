"""`lm ablate sizes=...`: what is run, frozen and refused, and what is said of losses that a known law has made."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.ablation.matching import moved
from lm.ablation.scaling.config import LadderConfig
from lm.ablation.scaling.extrapolate import Asking
from lm.ablation.scaling.law import Law
from lm.ablation.scaling.page import write_report
from lm.ablation.scaling.runs import Ladder, new_ladder
from lm.ablation.scaling.scaling_schema import FoundScaling
from lm.cli.compose.compose import compose_config
from lm.cli.compose.sizes import sizes
from lm.errors import ConfigError
from lm.schema import Tree
from lm.training.config import TrainConfig
from tests.ablation.conftest import Ablate, end
from tests.ablation.test_page import charts
from tests.conftest import Lm
from tests.report.test_page import Page

LAW = Law(E=1.5, A=30.0, B=20.0, a=0.35, b=0.42)
CLIMB = ("sizes=16,32,64", "tokens=1,2,4")
RECIPES = Path(__file__).parents[2] / "recipes"
SCHEMA = Path(__file__).parents[2] / "docs" / "scaling.schema.json"
Climbed = Callable[..., Ladder]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of few resamples."""
    monkeypatch.setattr("lm.ablation.scaling.report.RESAMPLES", 30)


@pytest.fixture(scope="module")
def base(corpus: list[str]) -> TrainConfig:
    return compose_config(corpus)


@pytest.fixture
def climbed(base: TrainConfig, corpus: list[str], tmp_path: Path) -> Climbed:
    """The ladder of CLIMB in the folder `ffn`, all of whose runs but the last `left` are said to have ended, with the losses of LAW.

    left: None where nothing is written.  changed: keys of the config of all sizes.
    """

    def make(left: int | None = 0, changed: Tree | None = None, **config: Any) -> Ladder:
        own = sizes("16,32,64", base.tree()["model"])
        asked = LadderConfig(**{"sizes": own, "overrides": corpus, "tokens": [1.0, 2.0, 4.0], **config})
        composed = dict.fromkeys(asked.sizes, base)
        for name, each in asked.sizes.items():
            for key, value in {**dict(text.split("=") for text in each), **(changed or {})}.items():
                composed[name] = moved(composed[name], key, int(value) if str(value).isdigit() else value)
        ladder = new_ladder(tmp_path / "ffn", asked, composed)
        if left is None:
            return ladder
        ladder.freeze()
        places, jobs = dict(zip(ladder.rungs, ladder.places("non_embedding"), strict=True)), ladder.missing()
        for number, job in enumerate(jobs[: len(jobs) - left]):
            end(ladder, job, LAW.loss(*places[job.variant][:2]) * (1 + 0.0005 * math.sin(7 * number)))
        return ladder

    return make


def scaling(folder: Path) -> Tree:
    return dict(json.loads((folder / "ffn/scaling.json").read_text()))


@pytest.mark.slow
def test_a_ladder_that_has_run_is_a_law_with_intervals_in_words_numbers_and_curves(
    climbed: Climbed, ablate: Ablate, lm: Lm, tmp_path: Path
) -> None:
    climbed(seeds=2)
    code, out, err = ablate("report", *CLIMB, "seeds=2", "flops=1e8", "at=5e4:4e3")
    assert code == 0, err
    found = scaling(tmp_path)
    for key in ("a", "b", "E", "n_exponent"):
        told = found["law"][key]
        assert told["low"] <= getattr(LAW, key) <= told["high"], key
    ((best,), (point,)) = found["optima"], found["points"]
    assert best["loss"]["low"] <= LAW.optimum(1e8).loss <= best["loss"]["high"] and best["n"]["value"] * best["tokens"][
        "value"
    ] * 6 == pytest.approx(1e8)
    assert point["loss"]["value"] == pytest.approx(LAW.loss(5e4, 4e3), rel=0.01)
    report, html = (tmp_path / "ffn/report.md").read_text(), (tmp_path / "ffn/report.html").read_text()
    page = Page(html)
    for text in (f"{found['law']['a']['value']:.4g}", "100 M", "non-embedding parameters", "Say tune=optim.lr", "arXiv:2203.15556"):
        assert text in report and text in page.text
    assert f"{found['law']['b']['value']:.4g}" in out and "report.html" in out
    drawn = {chart.attrib["aria-label"].partition(":")[0]: chart for chart in charts(html)}
    assert list(drawn) == [
        "Loss against size", "Loss against tokens", "Least loss against FLOPs", "Best size and tokens against FLOPs",
    ]  # fmt: skip
    for label, signs in (("Loss against size", 18), ("Loss against tokens", 18), ("Least loss against FLOPs", 18)):
        assert sum(title.text is not None and " at " in title.text for title in drawn[label].iter("title")) == signs, "a sign for each run"
    assert lm("ablate", "report", "study=ffn", "dir=.", "flops=1e8", "at=5e4:4e3")[:2] == (0, out), "by its name"


@pytest.mark.slow
def test_a_law_is_told_of_what_has_ended_and_a_run_that_diverged_is_shown_and_no_point_of_it(climbed: Climbed, tmp_path: Path) -> None:
    ladder = climbed(left=1)
    lost = ladder.missing()[0]
    ladder.note_diverged(lost)
    found = write_report(ladder, Asking())
    assert found.cells[lost.variant].runs == {"0": None} and found.law is not None
    assert not any("have ended" in warning for warning in found.warnings)
    assert any(warning.startswith(f"{lost.variant}: 1 of 1 runs diverged; the law is of the others") for warning in found.warnings)
    assert all(warning.endswith(".") for warning in found.warnings)
    assert "diverged at" in (tmp_path / "ffn/report.html").read_text() and "1 diverged" in (tmp_path / "ffn/report.md").read_text()


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (9, "0 sizes cannot show a bend"),
        (3, "2 sizes cannot show a bend"),
        (2, "7 pairs of size and tokens are there, and five unknowns take 8"),
    ],
)
def test_too_few_runs_have_no_law_and_say_why(left: int, said: str, climbed: Climbed, tmp_path: Path) -> None:
    found = write_report(climbed(left=left), Asking())
    assert found.law is None and any(said in warning for warning in found.warnings)
    assert found.tree() == scaling(tmp_path)
    Page((tmp_path / "ffn/report.html").read_text())


def test_scaling_json_is_what_its_schema_says() -> None:
    assert json.loads(SCHEMA.read_text()) == FoundScaling.model_json_schema(), "write it anew: tests/ablation/test_scaling.py"


def test_a_ladder_is_every_size_for_every_length_with_schedules_in_proportion(climbed: Climbed) -> None:
    ladder = climbed(left=9)
    shapes = {
        name: (config.model.d_model, config.trainer.max_steps, config.schedule.tree()["warmup_steps"])
        for name, config in ladder.variants.items()
    }
    assert shapes["16-x1"] == (16, 3, 2) and shapes["64-x4"] == (64, 12, 8) and len(shapes) == 9
    assert [config.model.tree()["ffn"]["hidden"] for config in ladder.variants.values()] == [32] * 3 + [64] * 3 + [128] * 3
    assert {cell.cost.tokens for cell in ladder.cells()} == {3 * 8 * 32, 6 * 8 * 32, 12 * 8 * 32}


def test_a_size_is_a_width_a_preset_or_overrides(base: TrainConfig) -> None:
    model = base.tree()["model"]
    assert sizes("48", model) == {"48": ["model.d_model=48", "model.ffn.hidden=96"]}
    assert sizes("nano,micro", model) == {"nano": ["model=nano"], "micro": ["model=micro"]}
    deep = sizes("model.n_layers=2,[model.n_layers=4,model.d_model=48]", model)
    assert deep == {"n_layers-2": ["model.n_layers=2"], "d_model-48+n_layers-4": ["model.n_layers=4", "model.d_model=48"]}


@pytest.mark.slow
def test_a_ladder_takes_more_seeds_and_nothing_else(climbed: Climbed, ablate: Ablate, lm: Lm) -> None:
    climbed(seeds=2)
    assert "18 runs: 3 sizes x 3 lengths x 2 seeds" in ablate("plan", *CLIMB)[1], "those of the ladder, where the command says none"
    assert "27 runs" in lm("ablate", "plan", "study=ffn", "dir=.", "seeds=3")[1]
    for place in ("./ffn", "ffn/", str(Path("ffn").absolute()), "ffn/ladder.json"):
        assert "27 runs" in lm("ablate", "plan", f"study={place}", "seeds=3")[1], place
    for args, said in (
        (["sizes=16,32,48", "tokens=1,2,4"], "its runs have begun, and others are asked now: ladder.sizes"),
        (["study=ffn"], "ladder.overrides was"),
    ):
        code, _, err = ablate("plan", *args)
        assert code == 2 and said in err.splitlines()[-1], err


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        ({"sizes": {"16": [], "32": []}}, {}, "sizes: 2 values cannot show how the loss bends"),
        ({"tokens": [1.0]}, {}, "tokens: 1 value cannot show how the loss bends"),
        ({"tokens": [1.0, 1.0, 2.0]}, {}, "tokens: 1, 1, 2 holds a value twice"),
        ({"tokens": [1.0, 1.1, 2.0]}, {}, "tokens: 1, 1.1, 2 holds a value twice, or two that are as many steps"),
        ({"tokens": [1.0, 2.0, -3.0]}, {}, "tokens: -3 times 3 steps is no training"),
        ({"tokens": [0.01, 1.0, 2.0]}, {}, "tokens: 0.01 times 3 steps is no training"),
        ({}, {"model.d_model": 32}, "sizes: 32 has .* non-embedding parameters, as 16 has"),
        ({}, {"trainer.early_stop": 2}, "trainer.early_stop ends a run before"),
        ({}, {"trainer.max_minutes": 1.0}, "trainer.max_minutes leaves a run's length to the clock"),
        ({}, {"check": True}, "sizes: 16: check=true trains nothing"),
        ({}, {"plan": True}, "sizes: 16: plan=true trains nothing"),
        ({"tune": "model.kind"}, {}, "tune=model.kind: variant 16-x1"),
    ],
)
def test_a_ladder_that_cannot_be_is_refused_before_anything_is_written(
    config: Tree, changed: Tree, said: str, climbed: Climbed, tmp_path: Path
) -> None:
    if "model.d_model" in changed:
        config = {"sizes": {name: ["model.ffn.hidden=64"] for name in ("16", "32", "64")}}
    with pytest.raises(ConfigError, match=said):
        climbed(left=None, changed=changed, **config)
    assert not (tmp_path / "ffn").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["sizes=16,32,64", "tokens=a,b,c"], "tokens"),
        (["sizes=16,32,32"], "sizes: 32 is given twice"),
        (["sizes=nano,micro,nanno"], "sizes: 'nanno' is neither a width such as 96, a preset of model, nor overrides"),
        (["sizes=16,32,model.d_modle=64"], "d_modle"),
        (["sizes=16,32,64", "match=params"], "match: a ladder of sizes fits a law to losses"),
        (["sizes=16,32,64", "study=ablation/ffn"], "study: a ladder of sizes"),
        (["model/ffn=swiglu,gelu", "tokens=1,2,4"], "tokens: only a ladder of sizes takes it"),
        (["noise", "flops=1e12"], "flops: lm ablate noise runs every config"),
        (["sizes=16,32,64", "flops=1e20"], "flops=1e+20: runs of"),
        (["sizes=16,32,64", "at=7"], "at=7: this is nothing to ask a law"),
        (["model/ffn=swiglu,gelu", "basline=swiglu"], "basline: there is no such key. Did you mean 'baseline'?"),
        ([f"study={RECIPES / 'ablation/ffn.yaml'}"], "Put it into FOLDER/recipes and write --config-dir FOLDER study=ffn."),
        (["report", "sizes=16,32,64"], "there is no ladder here. Start one: lm ablate sizes="),
    ],
)
def test_what_is_mistyped_is_told_before_anything_runs(args: list[str], said: str, ablate: Ablate, tmp_path: Path) -> None:
    code, _, err = ablate(*args)
    assert code == 2 and said in err.splitlines()[-1], err
    assert not (tmp_path / "ffn").exists()


@pytest.mark.slow
def test_a_ladder_runs_what_is_missing_and_nothing_twice(python: None, ablate: Ablate, tmp_path: Path) -> None:
    climb = ("sizes=16,24,32", "tokens=1,2,4", "jobs=2")
    code, out, err = ablate(*climb)
    assert code == 0 and err.count(": 9 runs to go") == 1 and "The runs" in out, err
    first = scaling(tmp_path)
    assert all(run is not None for cell in first["cells"].values() for run in cell["runs"].values())
    shutil.rmtree(tmp_path / "ffn/24-x2-seed-0/model")
    assert ablate(*climb)[2].count(": 1 run to go") == 1 and scaling(tmp_path) == first


@pytest.mark.slow
def test_a_rate_is_tuned_for_every_pair_alike(climbed: Climbed) -> None:
    ladder = climbed(left=45, tune="optim.lr")
    assert len(ladder.missing()) == 45
    while jobs := ladder.missing():
        for job in jobs:
            end(ladder, job, 3 + math.log(job.config.optim.lr / 0.0024) ** 2)
    found = write_report(ladder, Asking())
    assert {cell.tuned for cell in found.cells.values()} == {0.0024} and not any("Say tune=" in warning for warning in found.warnings)
    assert any("all losses are 3" in warning for warning in found.warnings)
