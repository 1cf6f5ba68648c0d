"""tools/alarms.py and tools/power.py, on runs whose truth is known."""

import json
import math
import random
import statistics

import pytest
from scipy import stats

from lm.report.statistics import differences, power
from tests.ablation.conftest import NewStudy, end
from tools import alarms
from tools import power as power_check
from tools.alarms import alarm, drawn, exact, judged, simulated
from tools.power import checked


def normal(n: int) -> list[float]:
    """Of mean 0 and standard deviation 1, to the last digit."""
    draw = random.Random(0)
    values = [draw.gauss(0, 1) for _ in range(n)]
    mean, sd = statistics.fmean(values), statistics.stdev(values)
    return [(value - mean) / sd for value in values]


def test_an_alarm_is_what_a_study_calls_different() -> None:
    """Also where Holm's correction decides, which it does in a quarter of these."""
    values = normal(40)
    single = []
    for pairs in drawn(values, 5, 60):
        found = differences(dict.fromkeys(range(5), 0.0), {name: dict(enumerate(own)) for name, own in pairs.items()})
        assert alarm(pairs) == any(one.p is not None and one.p < 0.05 for one in found.values())
        single.append(any(alarm({name: own}) for name, own in pairs.items()))
    assert sum(single) > sum(map(alarm, drawn(values, 5, 60)))


def test_the_exact_interval_of_a_rate_is_that_of_the_binomial() -> None:
    for k, n in ((0, 8), (3, 8), (8, 8), (500, 10_000)):
        expected = stats.binomtest(k, n).proportion_ci(method="exact")
        assert exact(k / n, n) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_forty_equal_runs_raise_5_percent_of_alarms_and_an_interval_says_how_surely() -> None:
    """Seen to fail with the spread of the drawing left in, which made the interval half as wide again."""
    values = normal(40)
    found = judged(values, 2, studies=600)
    assert found["low"] < 0.05 < found["high"] and found["high"] - found["low"] < 0.05


@pytest.mark.parametrize("apart", [0.0, 20.0])
def test_simulated_studies_alarm_as_they_should_and_each_interval_holds(apart: float) -> None:
    found = simulated(3, 5, apart, studies=400)
    assert found["alarms"] == 1 if apart else found["low"] < 0.05
    assert found["each holds"] > 0.945 and found["all hold"] >= 1 - 2 * (1 - found["each holds"]) - 1e-9


def test_an_effect_is_found_as_often_as_the_power_says_in_groups_of_real_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within three standard errors of 300 groups. Seen to fail with groups of one pair more."""
    monkeypatch.setattr(power_check, "SEEDS", (3, 5, 8))
    lines = list(checked([-0.8 + 0.8 * value for value in normal(1000)], [0.8, 0.4], groups=300))
    assert [line["seeds"] for line in lines] == [3, 5, 8]
    for line in lines:
        expected = [power(line["seeds"], sd, 0.8) for sd in (0.8, 0.4)]
        assert line["promised"] == pytest.approx(expected, rel=1e-3) and abs(line["found"] - expected[0]) < 3 * math.sqrt(0.25 / 300)
        assert (line["low"], line["high"]) == exact(line["found"], 1000 // line["seeds"])


@pytest.mark.slow
def test_both_read_the_runs_of_a_study(study: NewStudy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms, "STUDIES", 100)
    made, draw = study(seeds=6), random.Random(0)
    made.freeze()
    jobs = made.missing()
    for job in jobs:
        end(made, job, 2 + 0.01 * draw.gauss(0, 1) - 0.02 * (job.variant == "gelu"))
    alarms.main([str(made.folder / job.name) for job in jobs])
    spread, rate = map(json.loads, capsys.readouterr().out.splitlines())
    assert spread["runs"] == 12 and rate["variants"] == 2 and 0 <= rate["low"] <= rate["alarms"] <= rate["high"]
    promised = {"difference": {"total": 0.02, "interval": [0.01, 0.05]}}
    (made.folder / "noise.json").write_text(json.dumps({"variants": {"gelu": promised}}))
    power_check.main(str(made.folder), str(made.folder))
    said, *lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert said["pairs"] == 6 and [line["seeds"] for line in lines] == [2, 3]
    assert lines[1]["promised"] == [power(3, sd, abs(said["effect"])) for sd in (0.02, 0.01, 0.05)]
    made.note_diverged(jobs[0])
    with pytest.raises(SystemExit, match="gelu has 6 pairs, of which none may have diverged"):
        power_check.main(str(made.folder))
