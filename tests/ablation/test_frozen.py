"""What a folder was begun with, as its files say it: damaged, outdated, edited, or half way through tuning."""

import copy
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy import stats

from lm.ablation.config import StudyConfig
from lm.ablation.judging.page import page
from lm.ablation.judging.verdict import cells, report, verdict
from lm.ablation.matching import moved
from lm.ablation.noise import NoiseRuns, noise_runs
from lm.ablation.probe import Tried
from lm.ablation.runs import Asked, _file
from lm.ablation.study import AskedStudy, Study, new_study, read_study
from lm.cli.compose.compose import compose_config
from lm.cli.verbs.compare import _of_study
from lm.cli.views.study import plan_text
from lm.errors import CheckpointError, ConfigError
from lm.schema import Tree, flatten, from_tree
from lm.storage.atomic import atomic_folder
from lm.storage.run_folder import RunFolder
from tests.ablation.conftest import Ablate, NewStudy, end
from tests.conftest import Lm
from tests.runs import older
from tests.training.conftest import files_of_at_most


def damaged(whole: Tree, path: str, value: Any) -> Tree:
    """A tree with one value changed; ... takes it away."""
    tree = copy.deepcopy(whole)
    *parents, last = path.split(".")
    section = tree
    for key in parents:
        section = section[key]
    section[last] = value
    if value is ...:
        del section[last]
    return tree


def test_any_damage_to_any_field_of_a_frozen_study_is_refused_in_one_sentence(study: NewStudy) -> None:
    made = study(seeds=2, tune="optim.lr")
    made.freeze()
    file = made.folder / "study.json"
    whole = json.loads(file.read_text())
    of_config = [path for path in flatten(whole) if ".configs." in path]
    paths = [*(path for path in flatten(whole) if path not in of_config), *random.Random(0).sample(of_config, 8)]
    for path in [*paths, "asked", "asked.study", "asked.configs", "asked.configs.gelu.model"]:
        for value in (..., {"x": [1]}, "nope", 10**30):
            file.write_text(json.dumps(damaged(whole, path, value)))
            with pytest.raises(CheckpointError, match=r"study\.json.*[.]$"):
                read_study(made.folder)
                pytest.fail(f"{path}: {value}")


class Older(Asked):
    """What an older version wrote into study.json."""

    file: ClassVar[str] = AskedStudy.file

    study: Tree
    configs: Tree
    step_s: Tree


def test_a_study_that_was_begun_with_another_name_of_a_key_goes_on(study: NewStudy) -> None:
    made = study(seeds=2, overrides=[*study().config.overrides, "trainer.recompute=block"])
    asked = made.asked.tree()
    asked["configs"] = {name: older(config) for name, config in asked["configs"].items()}
    Older(**asked).freeze(made.folder)
    assert "checkpoint_blocks" in (made.folder / "study.json").read_text()
    assert read_study(made.folder).asked == made.asked
    made.freeze()


def test_a_study_of_a_plugin_asks_for_its_file_and_is_compared_without(study: NewStudy, capsys: pytest.CaptureFixture[str]) -> None:
    made = study(seeds=2)
    asked = made.asked.tree()
    asked["configs"]["gelu"]["model"]["norm"] = {"kind": "mine"}
    asked["configs"]["gelu"]["plugins"] = {"mine": "0" * 64}
    made.folder.mkdir(parents=True, exist_ok=True)
    (made.folder / "study.json").write_text(json.dumps(_file(made.hash, asked).tree()))
    with pytest.raises(ConfigError, match=r"study.json: it needs the plugin 'mine' .* Give its file, as in plugins=mine.py"):
        read_study(made.folder)
    assert _of_study(made.folder) is None
    assert f"the baseline is that of the study, {made.config.baseline}." in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"asked": 5, "hash": 5}', '{"seeds": NaN}', "\x00\x01", "[" * 100_000])
@pytest.mark.parametrize("doing", ["report", "run"])
def test_a_study_file_that_says_nothing_is_exit_code_3(content: str, doing: str, lm: Lm, tmp_path: Path) -> None:
    (tmp_path / "ffn").mkdir()
    (tmp_path / "ffn/study.json").write_text(content)
    code, _, err = lm("ablate", doing, "study=ffn", "dir=.")
    assert code == 3 and "study.json: " in err.splitlines()[-1], err


def test_a_study_file_that_is_a_folder_is_exit_code_3(lm: Lm, tmp_path: Path) -> None:
    (tmp_path / "ffn/study.json").mkdir(parents=True)
    assert lm("ablate", "report", "study=ffn", "dir=.")[0] == 3


def test_what_is_noted_of_a_diverged_run_is_read_with_care_and_holds_for_its_config_alone(study: NewStudy) -> None:
    made = study(seeds=2)
    made.freeze()
    job = made.missing()[0]
    made.note_diverged(job)
    assert made.result(job) == float("inf") and job not in made.missing()
    other = study(seeds=2, overrides=[], variants={"swiglu": ["optim.lr=0.5"], "gelu": ["optim.lr=0.25"]})
    assert [each.name for each in other.missing()].count(job.name) == 1, "another config of the same name has not run"
    note = made.file(job, "diverged.json")
    again = read_study(made.folder)
    for content in ("{}", '{"config": 5}', '{"runs": ["swiglu-seed-0"]}', "no"):
        note.write_text(content)
        with pytest.raises(CheckpointError, match=r"diverged\.json.*[.]$"):
            again.result(job)


def tuned_so_far(study: Study, variant: str, runs: int) -> None:
    """The metric falls with the value, so that the best is at the upper edge."""
    for job in study.tuning(variant)[:runs]:
        if study.result(job) is None and job.tuned is not None:
            end(study, job, 2 - job.tuned)


@pytest.mark.slow
def test_tuning_that_has_not_ended_chooses_nothing_and_says_how_far_it_is(study: NewStudy) -> None:
    made = study(seeds=2, tune="optim.lr", tune_seeds=[7])
    tuned_so_far(made, "gelu", 4)
    assert made.tuned("gelu") is None and made.reporting("gelu") == []
    found = verdict(made)
    row = found["variants"]["gelu"]
    assert row["tuned"] is None and row["mean"] is None and row["runs"] == {}
    assert row["tuning"] == {"ended": 4, "runs": 5} and found["variants"]["swiglu"]["tuning"] == {"ended": 0, "runs": 5}
    assert "gelu: 4 of 5 tuning runs have ended. The same command runs the others." in found["warnings"]
    assert cells(found)[2][-1] == "4 of 5 runs" and "(edge)" not in report(found)

    for runs in (5, 6, 7):  # of values that extend it as long as they are the best
        tuned_so_far(made, "gelu", runs)
    best = made.tuned("gelu")
    assert best is not None and best.at_edge and len(best.tried) == 7 and len(made.reporting("gelu")) == 2
    assert verdict(made)["variants"]["gelu"]["tuning"] is None
    assert {job.variant for job in made.missing()} == {"swiglu"}


def test_tuning_tries_no_value_that_the_config_refuses(study: NewStudy, corpus: list[str]) -> None:
    made = study(seeds=2, tune="model.dropout", overrides=[*corpus, "model.dropout=0.2"])
    tuned_so_far(made, "gelu", 5)
    best = made.tuned("gelu")
    assert best is not None and (best.best, best.at_edge) == (0.8, True), "a dropout of 1.6 is none"
    assert [job.variant for job in made.missing()] == 5 * ["swiglu"] and verdict(made)["variants"]["gelu"]["tuned"]["at_edge"]
    with pytest.raises(ConfigError, match=r"tune=model\.dropout: tuning tries 0\.25 to 4 times .*0\.3, and model\.dropout: 1\.2 does"):
        study(seeds=2, tune="model.dropout", overrides=[*corpus, "model.dropout=0.3"])


@pytest.mark.parametrize("steep, best", [(0.0, 1.1), (5.0, 2**-0.25)])
def test_a_tuned_rate_is_the_best_of_a_parabola_and_near_the_best_that_was_tried(study: NewStudy, steep: float, best: float) -> None:
    """Best at 1.1 times the middle rate; or there, and the rates above it worse by `steep`. Seen to fail: at 0.8 times it."""
    made = study(seeds=2, tune="optim.lr", tune_seeds=[7])
    jobs = {job.tuned: job for job in made.tuning("gelu") if job.tuned is not None}
    middle = sorted(jobs)[2]
    for rate, job in jobs.items():
        end(made, job, 1 + math.log2(rate / middle / 1.1) ** 2 + steep * (rate > middle))
    found = made.tuned("gelu")
    assert found is not None and found.best == pytest.approx(best * middle, rel=0.005)


@pytest.mark.slow
def test_a_variant_that_is_no_better_by_the_look_gets_no_more_seeds(study: NewStudy) -> None:
    made = study(seeds=4, give_up_after=2, variants={ffn: [f"model/ffn={ffn}"] for ffn in ("swiglu", "gelu", "relu2")})
    made.freeze()
    first = made.missing()
    assert {job.seed for job in first} == {0, 1} and len(first) == 6
    values = {"swiglu": 4.0, "gelu": 5.0, "relu2": 4.01}
    for job in reversed(first):
        assert all(left in first for left in made.missing()), "nothing beyond the look before all of it is there"
        end(made, job, values[job.variant] + {"swiglu": 0.1, "gelu": 0.101, "relu2": 0.05}[job.variant] * job.seed)
    assert [job.name for job in made.missing()] == [f"{name}-seed-{seed}" for name in ("swiglu", "relu2") for seed in (2, 3)]
    for job in made.missing():
        end(made, job, values[job.variant] - 0.02 * job.seed)
    found = verdict(read_study(made.folder))
    gelu = found["variants"]["gelu"]["difference"]
    assert made.missing() == [] and gelu["given_up"] and gelu["p"] is None and len(gelu["pairs"]) == 2
    assert cells(found)[2][4] == "no better (given up after 2 seeds)" and "at which it was given up): no better." in report(found)
    assert not any("same command" in warning for warning in found["warnings"]) and "10 of 10 runs have ended" in page(found, {})
    with pytest.raises(ConfigError, match=r"give_up_after was 2, now 3"):
        study(seeds=4, give_up_after=3, variants=made.config.variants).freeze()


def test_where_all_are_given_up_the_baseline_gets_no_more_seeds_either(study: NewStudy) -> None:
    made = study(seeds=5, give_up_after=2)
    for job in made.missing():
        end(made, job, 4.0 + (job.variant == "gelu") + 0.001 * job.seed * (job.variant == "gelu"))
    assert made.missing() == [] and "4 of 4 runs have ended" in page(found := verdict(made), {})
    assert not any("same command" in warning for warning in found["warnings"])


@pytest.mark.slow
def test_differences_are_told_in_tokens_once_the_baseline_ran_at_other_lengths(study: NewStudy) -> None:
    made = study(seeds=3, exchange=True, variants={ffn: [f"model/ffn={ffn}", "trainer.max_steps=8"] for ffn in ("swiglu", "gelu")})
    assert "+ 2 x 3 of swiglu at 0.5 and 2 times its tokens" in plan_text(made, {})
    took = {"swiglu": Tried(2.0, 0.5, 3.0), "gelu": Tried(1.0, 0.5, 3.0)}  # 3 x (8 + 4 - 3 + 16 - 5) steps of swiglu, 3 x 8 of gelu
    assert "all steps take 2 min 24 s, 12 starts 36.0 s" in plan_text(made, took)
    rounds = []
    for ends in ({"swiglu": 4.0, "gelu": 3.95}, {"swiglu@0.5": 4.1, "swiglu@2": 3.9}):
        rounds.append([(job.name, job.trunk) for job in made.missing()])
        for job in made.missing():
            end(made, job, ends[job.name.rpartition("-seed-")[0]] + job.seed / 100)
        found = verdict(made)
        if len(rounds) == 1:
            assert "swiglu: 0 of 3 runs at 0.5 times its tokens have ended." in found["warnings"] and "| - |" in report(found)
    assert [len(jobs) for jobs in rounds] == [6, 6] and not made.missing()
    assert rounds[1][::3] == [("swiglu@0.5-seed-0", ("swiglu-seed-0", 3)), ("swiglu@2-seed-0", ("swiglu-seed-0", 5))]
    tokens = [length["tokens"] for length in found["exchange"].values()]
    assert list(found["exchange"]) == ["0.5", "1", "2"] and [2 * n for n in tokens[:2]] == tokens[1:]
    assert found["variants"]["gelu"]["worth"]["factor"] == pytest.approx(2**0.5) and not any("in tokens" in x for x in found["warnings"])
    said = report(found)
    assert "+41 % [+41 %, +41 %]" in said and "It is worth 41 % more tokens (Holm-corrected 95 % interval +41 % to +41 %)." in said
    assert "read off the baseline's runs at half and at twice its tokens" in said


def test_a_variant_with_a_diverged_run_is_told_in_no_tokens_while_branches_are_missing(study: NewStudy) -> None:
    made = study(seeds=3, exchange=True, variants={ffn: [f"model/ffn={ffn}", "trainer.max_steps=8"] for ffn in ("swiglu", "gelu")})
    for job in made.missing():
        if job.name == "gelu-seed-2":
            made.note_diverged(job)
        else:
            end(made, job, {"swiglu": 4.0, "gelu": 3.95}[job.variant] + job.seed / 100)
    for job in made.missing():
        if job.seed < 2:
            end(made, job, {"swiglu@0.5": 4.1, "swiglu@2": 3.9}[job.name.rpartition("-seed-")[0]] + job.seed / 100)
    found = verdict(made)
    assert found["variants"]["gelu"]["difference"]["mean"] is None is found["variants"]["gelu"]["worth"]
    assert "| - |" in report(found) and "1 of 3 runs diverged" in page(found, {})


def test_branches_of_a_mixture_go_through_all_of_its_phases_and_share_no_step(study: NewStudy, corpus: list[str]) -> None:
    file = next(each for each in corpus if each.startswith("data.files=")).partition("=")[2]
    sources = ",".join(f"{{name:{name},data:{{kind:text,files:[{file}]}},weight:1}}" for name in "ab")
    plain = [each for each in corpus if not each.startswith(("data=", "data.files=", "trainer.max_steps="))]
    asked = [*plain, "data=mix", f"data.sources=[{sources}]", "data.phases=[{until_step:8,weights:{a:1}}]", "trainer.max_steps=10"]
    made = study(seeds=2, exchange=True, overrides=asked)
    ends = {factor: [phase["until_step"] for phase in jobs[0].config.tree()["data"]["phases"]] for factor, jobs in made.branches().items()}
    assert ends == {0.5: [4], 2.0: [16]}
    assert {job.trunk for jobs in made.branches().values() for job in jobs} == {None}


def test_an_option_of_the_baseline_that_a_variant_has_not_is_told(study: NewStudy) -> None:
    lacks = {"full": ["model/attention=mha", "model.attention.qk_norm=head"], "low": ["model/attention=mla"]}
    said = [note for note in verdict(study(seeds=2, variants=lacks, baseline="full"))["warnings"] if "differ in more" in note]
    assert said == ["low: it has no model.attention.qk_norm=head, as full has, so that the two differ in more than was asked."]
    alike = {"full": ["model/attention=mha", "model.attention.qk_norm=none"], "low": ["model/attention=mla"]}
    assert not any("differ in more than was" in note for note in verdict(study(seeds=2, variants=alike, baseline="full"))["warnings"])


def test_runs_that_were_not_made_alike_are_told_so(study: NewStudy) -> None:
    made = study(seeds=2)
    for job in made.missing():
        end(made, job, 2.0)
        own = {"data_fingerprint": f"{job.variant}-{job.seed * (job.variant == 'gelu')}", "torch": "2.13.0", "device": f"CPU {job.seed}"}
        folder = RunFolder(made.folder / job.name)
        folder.write_summary(folder.summary() | own)
        shutil.rmtree(folder.model)
        with atomic_folder(folder.model) as model:
            (model / "config.json").write_text(json.dumps({"parent_hash": str(job.seed * (job.variant == "gelu"))}))
    told = verdict(made)["warnings"]
    assert "Unfair: gelu: its runs read different data or tokens (fingerprints gelu-0, gelu-1)." in told
    assert [each[:12] for each in told if "began from different weights" in each] == ["Unfair: gelu"]
    assert "The runs differ in more than their configs: device (CPU 0, CPU 1)." in told
    assert not any("swiglu: its runs read" in each or "torch" in each for each in told)


def test_variants_that_are_measured_on_other_labels_do_not_compare(study: NewStudy) -> None:
    made = study(seeds=2)
    for job in made.missing():
        end(made, job, 2.0)
        sums = {str(row): [10.0, 5, 100.0 - 25 * (job.variant == "gelu") * row] for row in range(2)}
        RunFolder(made.folder / job.name).write_test_documents({"unit": "rows", "sums": sums})
    said = "Not comparable: the metric is over other text where labels or tokens differ (swiglu: 200 bytes, gelu: 175 bytes)."
    assert said in verdict(made)["warnings"]


def test_what_the_sample_of_text_contributes_is_told_where_both_were_tested_on_the_same_documents(study: NewStudy) -> None:
    """Two documents, two seeds each: nats, tokens, bytes."""
    made = study(seeds=2)
    nats = {"swiglu": ([10.0, 30.0], [12.0, 30.0]), "gelu": ([11.0, 27.0], [11.0, 27.0])}
    for job in made.missing():
        end(made, job, 2.0 + job.seed / 10 + 0.1 * (job.variant == "gelu"))
        sums = {str(number): [value, 5, 10 * (number + 1)] for number, value in enumerate(nats[job.variant][job.seed])}
        RunFolder(made.folder / job.name).write_test_documents({"unit": "documents", "sums": sums})
    found = verdict(made)
    text = found["variants"]["gelu"]["text"]
    bits = np.array([11.0, 27.0]) / math.log(2) - np.array([11.0, 30.0]) / math.log(2)  # means over seeds, by document
    left = (bits - bits.sum() / 30 * np.array([10, 20])) / 30
    assert text["half"] == pytest.approx(stats.t.ppf(0.975, 1) * math.sqrt(2 * (left**2).sum()))
    assert (text["unit"], text["number"]) == ("documents", 2)
    said = f"±{text['half']:.4f}"
    assert report(found).count(said) == 2 and "over the 2 documents of the test text" in report(found)
    other = RunFolder(made.folder / "gelu-seed-1")
    other.write_test_documents({"unit": "documents", "sums": {"7": [1.0, 1, 1]}})
    assert verdict(made)["variants"]["gelu"]["text"] is None and "is in none of the intervals" in report(verdict(made))
    for content in ("{}", '{"unit": "documents", "sums": {"0": [1, 1]}}', '{"unit": "words", "sums": {}}', "[" * 9999):
        (other.path / "test_documents.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"test_documents\.json.*[.]$"):
            verdict(made)


def test_seeds_are_added_and_never_left_out(study: NewStudy, lm: Lm, corpus: list[str]) -> None:
    study(seeds=4).freeze()
    with pytest.raises(ConfigError, match="seeds=3, and 4 were asked for before"):
        study(seeds=3).freeze()
    assert read_study(study(seeds=4).folder).config.seeds == 4
    call = ("ablate", "plan", "dir=.", "name=ffn", "threads=1", "model/ffn=swiglu,gelu", *corpus)
    assert "2 variants x (4 seeds)" in lm(*call)[1], "those of the study, where the command says none"
    assert "2 variants x (6 seeds)" in lm(*call, "seeds=6")[1]
    code, _, err = lm(*call, "seeds=2")
    assert code == 2 and "seeds=2, and 4 were asked for before" in err.splitlines()[-1]
    study(seeds=6).freeze()
    assert read_study(study(seeds=6).folder).config.seeds == 6


@pytest.mark.parametrize("change", [{"least_effect": 0.5}, {"threads": 2}, {"baseline": "gelu"}, {"overrides": ["optim.lr=0.5"]}])
def test_a_study_that_asks_for_something_else_is_refused_with_the_difference(change: Tree, study: NewStudy, tmp_path: Path) -> None:
    study().freeze()
    whole = (tmp_path / "ffn/study.json").read_bytes()
    with pytest.raises(ConfigError, match=f"its runs have begun, and others are asked now: .*{next(iter(change))} was .*, now "):
        study(**change).freeze()
    assert (tmp_path / "ffn/study.json").read_bytes() == whole


@pytest.mark.slow
def test_a_square_of_noise_is_of_one_config_and_one_number_of_threads(corpus: list[str], tmp_path: Path) -> None:
    def square(threads: int = 1, *overrides: str) -> NoiseRuns:
        return noise_runs(tmp_path, {"baseline": compose_config([*corpus, *overrides])}, threads, "val_loss")["baseline"]

    square().freeze()
    square().freeze()
    with pytest.raises(ConfigError, match="threads was 1, now 2"):
        square(2).freeze()
    with pytest.raises(ConfigError, match=r"config\.optim\.lr was .*, now 0\.5"):
        square(1, "optim.lr=0.5").freeze()
    jobs = square().missing()
    square().note_diverged(jobs[0])
    for job in jobs[1:]:
        end(square(), job, 1.0)
    with pytest.raises(ConfigError, match="1 of 9 runs diverged, which has no spread"):
        square().square()
    assert len(square(1, "optim.lr=0.5").missing()) == 9, "what is noted of one config says nothing of another"


@pytest.mark.slow
def test_tuning_reads_validation_and_what_judges_is_a_test_set_aside(study: NewStudy) -> None:
    """Seen to fail with the report's figure for the tuning runs."""
    tuned = study(tune="optim.lr", seeds=2)
    for metric in ("val_bits_per_byte", "test_bits_per_byte"):
        jobs = tuned.missing()
        assert {(job.metric, job.config.data.test_frac) for job in jobs} == {(metric, 0.5)}
        for job in jobs:
            end(tuned, job, 4 + abs(job.config.optim.lr - 0.01))
    assert not tuned.missing() and not any("Validation text" in warning for warning in verdict(tuned)["warnings"])


def test_a_study_that_judges_by_what_it_tuned_on_says_so(study: NewStudy) -> None:
    asked = study(tune="optim.lr", metric="val_bits_per_byte")
    assert asked.variants["gelu"].data.test_frac == 0
    assert "Validation text chose optim.lr and judges what it chose. Say metric=test_bits_per_byte." in verdict(asked)["warnings"]


@pytest.mark.slow
def test_a_full_disk_ends_a_study_in_one_sentence_and_the_same_command_goes_on(ablate: Ablate, study: NewStudy, tmp_path: Path) -> None:
    call = ("run", "model/ffn=swiglu,gelu", "seeds=2")

    def refused(name: str) -> None:
        with files_of_at_most(500):
            code, _, err = ablate(*call)
        assert code == 5 and f"ffn/{name}: " in err.splitlines()[-1] and err.splitlines()[-1].endswith("choose another folder."), err
        assert not (tmp_path / "ffn" / name).exists() and not [*tmp_path.glob("ffn/**/.tmp-*")]

    refused("study.json")
    code, out, _ = ablate("plan", *call[1:])
    assert code == 0 and "4 runs" in out
    made = study(seeds=2)
    made.freeze()
    refused("jobs/swiglu-seed-0.yaml")
    for number, job in enumerate(made.missing()):
        end(made, job, 1.0 + number / 10)
    refused("verdict.json")
    assert ablate(*call)[0] == 0 and json.loads((tmp_path / "ffn/verdict.json").read_text())["seeds"] == 2


def test_a_study_that_matches_time_has_the_steps_that_were_measured_before_it_began(study: NewStudy, tmp_path: Path) -> None:
    plain = study(match="tokens").variants
    long = {name: moved(config, "trainer.max_steps", 3000) for name, config in plain.items()}
    config = from_tree(StudyConfig, {"variants": {"swiglu": [], "gelu": []}, "match": "time", "seeds": 2})
    begun = AskedStudy(study=config, configs=long, step_s={"swiglu": 0.3, "gelu": 0.2})
    made = new_study(tmp_path / "time", config, long, begun)
    assert {name: found.trainer.max_steps for name, found in made.variants.items()} == {"swiglu": 3000, "gelu": 4500}
    assert made.variants["gelu"].schedule.tree()["warmup_steps"] == 1.5 * long["gelu"].schedule.tree()["warmup_steps"]
    assert made.asked.tree()["step_s"] == begun.step_s and not (tmp_path / "time").exists(), "nothing is measured again"
    found = verdict(made)
    assert found["variants"]["gelu"]["step_s"] == 0.2 and "measured before: swiglu 0.3 s, gelu 0.2 s." in report(found)
    with pytest.raises(ConfigError, match=r"match=time: variant gelu takes 0\.8 s in 4 steps where the baseline takes 0\.9 s"):
        new_study(tmp_path / "time", config, plain, begun)


def test_runs_that_ended_before_an_option_was_added_keep_their_results(study: NewStudy) -> None:
    """Seen to fail: attention.query_growth was added, and all runs of older studies had no result, and could have none."""
    made = study(seeds=2)
    job = made.missing()[0]
    end(made, job, 2.5)
    run = RunFolder(made.folder / job.name)
    run.write_config(damaged(job.config.tree(), "model.attention.query_growth", ...))
    assert made.result(job) == 2.5
    run.write_config(damaged(job.config.tree(), "model.attention.n_heads", 1))
    assert Study(made.folder, made.asked).result(job) is None


def test_a_variant_that_is_called_better_is_not_within_the_noise_too(study: NewStudy) -> None:
    less = {"swiglu": 0.0, "gelu": 1.0, "relu2": 1.0, "geglu": 0.0105}
    made = study(seeds=5, variants={ffn: [f"model/ffn={ffn}"] for ffn in less})
    for job in made.missing():
        end(made, job, 4.0 - less[job.variant] + 0.005 * (job.seed - 2) * (job.variant != "swiglu"))
    found = verdict(made)
    assert {name: (row["difference"] or {}).get("verdict") for name, row in found["variants"].items()} == {
        name: "better" if less[name] else None for name in less
    }
    assert not any("noise" in warning for warning in found["warnings"])


def test_a_variant_of_which_each_run_ends_as_the_baselines_is_told_so(study: NewStudy) -> None:
    made = study(seeds=2)
    for job in made.missing():
        end(made, job, 4.0 + 0.01 * job.seed)
    said = "gelu: its test_bits_per_byte is that of swiglu to the last digit, for every seed, as if what it changes were never used."
    assert f"{said} Look whether it is what was meant." in verdict(made)["warnings"]
