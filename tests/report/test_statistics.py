"""Intervals, corrections and verdicts: against scipy's own, known examples, and simulation where the truth is known."""

import math
import random
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from lm.report.noise import split_noise
from lm.report.statistics import differences, holm, power, seeds_needed, text_error, worth
from tools.alarms import dismissed

Runs = dict[int, float]


def normal(draw: random.Random, n: int, mean: float = 0.0, sd: float = 1.0) -> Runs:
    return {seed: draw.gauss(mean, sd) for seed in range(n)}


def test_one_variant_has_the_interval_and_p_of_the_paired_t_test() -> None:
    draw = random.Random(0)
    base, other = normal(draw, 6), normal(draw, 6, 0.5)
    found = differences(base, {"x": other})["x"]
    expected = stats.ttest_rel(list(other.values()), list(base.values()))
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval()), rel=1e-9)
    assert found.near == pytest.approx(tuple(expected.confidence_interval(0.9)), rel=1e-9)
    signs = [np.mean(np.array(found.pairs) * [1 if k >> i & 1 else -1 for i in range(6)]) for k in range(64)]
    assert found.permutation_p == np.mean(np.abs(signs) >= abs(np.mean(found.pairs)) - 1e-12)


def test_the_exact_permutation_test_counts_ties_and_takes_little_memory() -> None:
    pairs = [-0.1, -0.2, 0.2, -0.1, 0.3, -0.1]  # whose sum is 0 but for rounding, so that no signs give less
    assert differences(dict.fromkeys(range(6), 0.0), {"x": dict(enumerate(pairs))})["x"].permutation_p == 1.0
    tracemalloc.start()
    differences(dict.fromkeys(range(20), 0.0), {"x": normal(random.Random(0), 20)})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 128 * 2**20, "2^20 sums of 8 bytes, and a few copies"


def test_holm_multiplies_the_smallest_p_by_their_number_and_keeps_the_order() -> None:
    corrected, levels = holm({"a": 0.01, "b": 0.04, "c": 0.03})
    assert corrected == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert levels == pytest.approx({"a": 0.05 / 3, "c": 0.05 / 2, "b": 0.05 / 2})  # b is judged as c was, which is not rejected


def test_only_shared_seeds_are_compared() -> None:
    assert differences({0: 1.0, 1: 2.0, 7: 9.0}, {"x": {0: 1.5, 1: 2.75, 3: 0.0}})["x"].pairs == (0.5, 0.75)


@pytest.mark.parametrize(
    ("mean", "sd", "least_effect", "expected"),
    [
        (-1.0, 0.1, 0.0, "better"),
        (-1.0, 0.1, 0.5, "better"),
        (1.0, 0.1, 0.0, "no better"),
        (0.1, 0.1, 0.5, "equal within"),
        (-0.2, 0.1, 0.5, "equal within"),  # surely a gain, and none worth acting on
        (0.6, 0.3, 0.5, "no better"),
        (-0.3, 2.0, 0.5, "cannot tell"),
    ],
)
def test_each_verdict_says_what_the_intervals_exclude(mean: float, sd: float, least_effect: float, expected: str) -> None:
    draw = random.Random(1)
    noise = [draw.gauss(0, 1) for _ in range(8)]
    centred = [(x - sum(noise) / 8) / float(np.std(noise, ddof=1)) for x in noise]
    found = differences(dict.fromkeys(range(8), 0.0), {"x": {i: mean + sd * x for i, x in enumerate(centred)}}, least_effect)["x"]
    assert found.verdict == expected
    assert (found.more_seeds is not None) == (expected == "cannot tell")


def test_a_diverged_run_is_never_dropped() -> None:
    base = dict.fromkeys(range(6), 1.0)
    some = differences(base, {"x": {**dict.fromkeys(range(6), 0.5), 3: math.inf}})["x"]
    assert some.mean is None and some.interval is None and some.verdict == "cannot tell"
    every = differences(base, {"x": dict.fromkeys(range(6), math.inf)})["x"]
    assert every.p == pytest.approx(2 / 64) and every.verdict == "no better"
    both = differences({0: math.inf, 1: 1.0, 2: 1.1}, {"x": {0: math.inf, 1: 0.9, 2: 1.2}})["x"]
    assert both.mean is None and (both.p, both.verdict) == (1.0, "cannot tell"), "two runs that diverged are no difference of 0"
    gone = dict.fromkeys(range(6), math.inf)
    assert differences(gone, {"x": gone}, least_effect=0.01)["x"].verdict == "cannot tell"
    half = {seed: math.inf if seed % 2 else 1.0 for seed in range(12)}
    assert differences(half, {"x": dict.fromkeys(range(12), math.inf)})["x"].verdict == "no better"


def test_where_five_runs_diverged_a_sixth_would_tell() -> None:
    base = dict.fromkeys(range(5), 1.0)
    found = differences(base, {"x": dict.fromkeys(range(5), math.inf)})["x"]
    assert (found.verdict, found.more_seeds) == ("cannot tell", 1)
    assert differences(base, {"x": {0: 0.5, **dict.fromkeys(range(1, 5), math.inf)}})["x"].more_seeds is None


def test_variants_that_have_not_run_yet_count_in_the_correction() -> None:
    base, own = dict.fromkeys(range(5), 0.0), dict(enumerate([-1.0, -0.3, -1.2, -0.1, -0.8]))
    alone = differences(base, {"a": own})["a"]
    waiting = differences(base, {"a": own, "b": {}, "c": {0: 0.1}})
    assert waiting["a"].p == pytest.approx(3 * alone.p) and waiting["b"].p is None is waiting["c"].p


@pytest.mark.slow
def test_so_many_more_seeds_tell_four_times_in_five() -> None:
    """A variant that is a little worse, and one that is equal, where the least effect is 1."""
    draw = np.random.default_rng(0)
    for mean, sd in ((0.4, 1.5), (0.0, 1.2)):
        pairs = draw.normal(0, 1, 5)
        exact = (pairs - pairs.mean()) / pairs.std(ddof=1) * sd + mean
        n = 5 + int(differences(dict.fromkeys(range(5), 0.0), {"x": dict(enumerate(exact))}, 1.0)["x"].more_seeds or 0)
        told = sum(
            differences(dict.fromkeys(range(n), 0.0), {"x": dict(enumerate(draw.normal(mean, sd, n)))}, 1.0)["x"].verdict != "cannot tell"
            for _ in range(100)
        )
        assert n > 5 and told / 100 > 0.7


def test_the_error_of_a_sample_of_text_is_that_of_the_mean_difference_where_all_documents_are_alike() -> None:
    draw = np.random.default_rng(0)
    base, variant = draw.normal(50, 5, 40), draw.normal(49, 5, 40)
    found = text_error([(value, 20.0) for value in base], [(value, 20.0) for value in variant])
    assert found == pytest.approx(stats.sem((variant - base) / 20), rel=1e-12)


@pytest.mark.parametrize("same", [True, False], ids=["paired", "of other sizes"])
def test_the_error_of_a_sample_of_text_is_what_drawing_documents_again_spreads(same: bool) -> None:
    """Documents of very different lengths, of which long ones are easier, and each is as hard for one model as for the other."""
    draw = np.random.default_rng(1)
    sizes, hard = draw.lognormal(5, 1, 300), draw.normal(0, 0.3, 300)
    sides = []
    for shift in (0.0, -0.05):
        own = sizes if same else sizes * draw.uniform(0.5, 1.0, 300)
        sides.append(np.stack([own * (2 + hard + shift - 0.1 * np.log(own) + draw.normal(0, 0.05, 300)), own]))
    again = draw.integers(0, 300, (4000, 300))
    ratios = [side[:, again].sum(-1) for side in sides]
    spread = np.std(ratios[1][0] / ratios[1][1] - ratios[0][0] / ratios[0][1])
    assert text_error(*(list(zip(*side.tolist(), strict=True)) for side in sides)) == pytest.approx(spread, rel=0.05)


def lengths(draw: random.Random, sd: float, seeds: int = 6) -> dict[float, Runs]:
    """A baseline that loses 0.1 for each doubling of its tokens; of a seed's spread, a part is the same at all lengths."""
    own = normal(draw, seeds, 0, sd)
    return {2.0**k: {seed: 4 - 0.1 * k + value + draw.gauss(0, sd / 2) for seed, value in own.items()} for k in (-1, 0, 1)}


@pytest.mark.parametrize("factor", [0.5, 0.7, 1.0, 1.23, 2.0])
def test_without_noise_a_difference_is_worth_the_tokens_that_make_it(factor: float) -> None:
    base = lengths(random.Random(0), 0.0)
    found = worth(base, dict.fromkeys(range(6), 4 - 0.1 * math.log2(factor)), 0.05)
    assert found is not None and found.factor == pytest.approx(factor, rel=1e-9)


def test_the_ends_of_what_a_difference_is_worth_are_where_the_paired_test_begins_to_tell() -> None:
    draw = random.Random(3)
    base = lengths(draw, 0.03)
    variant = {seed: value - 0.03 + draw.gauss(0, 0.01) for seed, value in base[1.0].items()}
    found = worth(base, variant, 0.02)
    assert found is not None and found.factor is not None and None not in found.interval
    for factor, p in zip((*found.interval, found.factor), (0.02, 0.02, 1.0), strict=True):
        there = [np.interp(math.log(factor), np.log([0.5, 1, 2]), [base[k][seed] for k in (0.5, 1, 2)]) for seed in range(6)]
        assert stats.ttest_rel(list(variant.values()), there).pvalue == pytest.approx(p, abs=0.002)


@pytest.mark.parametrize(
    ("loss", "sd", "expected"),
    [(3.7, 0.001, (None, (2.0, None))), (4.3, 0.001, (None, (None, 0.5))), (4.0, 5.0, (1.0, (None, None)))],
    ids=["more than twice", "less than half", "cannot tell"],
)
def test_beyond_the_lengths_that_ran_nothing_is_estimated(loss: float, sd: float, expected: object) -> None:
    noise = [x - 3.5 for x in range(1, 7)]
    base = {2.0**k: dict.fromkeys(range(6), 4 - 0.1 * k) for k in (-1, 0, 1)}
    found = worth(base, {seed: loss + sd * x for seed, x in enumerate(noise)}, 0.05)
    assert found is not None and (None if found.factor is None else round(found.factor, 9), found.interval) == expected


def test_what_more_tokens_do_not_improve_or_too_few_runs_measured_tells_no_tokens() -> None:
    base = lengths(random.Random(0), 0.01)
    assert worth({**base, 2.0: dict.fromkeys(range(6), 4.5)}, base[1.0], 0.05) is None
    assert worth({**base, 2.0: {**base[2.0], 3: math.inf}}, base[1.0], 0.05) is None
    assert worth({**base, 2.0: {0: 3.9}}, base[1.0], 0.05) is None


def test_one_baseline_is_worth_its_own_tokens_as_often_as_the_interval_says_and_as_its_difference_does() -> None:
    draw, missed = random.Random(4), 0
    for _ in range(200):
        base = lengths(draw, 0.02, 5)
        variant = {seed: value + draw.gauss(0, 0.02) for seed, value in base[1.0].items()}
        told, found = differences(base[1.0], {"x": variant})["x"], worth(base, variant, 0.05)
        assert told.interval is not None
        if found is not None:
            inside = (found.interval[0] or 0) <= 1 <= (found.interval[1] or math.inf)
            assert inside or not told.interval[0] <= 0 <= told.interval[1]
            missed += not inside
    assert 2 <= missed <= 22


def test_two_runs_alike_in_every_seed_are_no_evidence() -> None:
    runs = normal(random.Random(0), 12)
    found = differences(runs, {"x": runs})["x"]
    assert (found.mean, found.interval, found.p, found.permutation_p, found.bootstrap) == (0.0, (0.0, 0.0), 1.0, 1.0, None)
    assert (found.verdict, found.more_seeds) == ("cannot tell", None), "nor would further ones be"


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "seeds"), [(2, 3), (4, 5), (9, 5)])
def test_among_equal_variants_at_most_5_percent_of_studies_raise_an_alarm(rows: int, seeds: int) -> None:
    """The limit of a binomial with 5 % at 150 studies is 13 (97.5 %). Seen to fail without Holm's correction at 4 and 9."""
    draw = random.Random(rows)
    alarms = 0
    for _ in range(150):
        found = differences(normal(draw, seeds), {str(k): normal(draw, seeds) for k in range(rows)})
        alarms += any(row.p is not None and row.p < 0.05 for row in found.values())
    assert alarms <= stats.binom.ppf(0.975, 150, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1], ids=["worse", "better"])
def test_at_most_5_percent_of_studies_dismiss_a_variant_that_lies_beyond_the_least_effect(sign: int) -> None:
    """Seen to fail, where it was not corrected for the number of variants: 14 % with four."""
    assert dismissed(4, sign, 150)["false"] * 150 <= stats.binom.ppf(0.975, 150, 0.05)


def test_no_better_than_variants_that_are_is_said_at_the_level_of_all_of_them() -> None:
    """Seen to fail by Holm's procedure alone, whose last interval here is one of 95 % where the first ones are rejected."""
    centred = np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]) * math.sqrt(7 / 8)
    drawn = {name: dict(enumerate(mean + centred * 0.21 * math.sqrt(8))) for name, mean in {"a": -9.0, "b": -8.0, "x": -0.46}.items()}
    alone = differences(dict.fromkeys(range(8), 0.0), {"x": drawn["x"]}, 1.0)["x"]
    among = differences(dict.fromkeys(range(8), 0.0), drawn, 1.0)["x"]
    assert (alone.verdict, among.verdict) == ("equal within", "cannot tell") and among.interval == alone.interval


def test_what_p_tells_of_a_worse_variant_its_verdict_tells_too() -> None:
    """Seen to fail: beside others that Holm's procedure rejects, p was 0.04 and the interval above 0, and the verdict "cannot tell"."""
    centred = np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]) * math.sqrt(7 / 8)
    means = {"a": -9.0, "b": 8.0, "c": 7.0, "x": 0.53}
    drawn = {name: dict(enumerate(mean + centred * 0.21 * math.sqrt(8))) for name, mean in means.items()}
    found = differences(dict.fromkeys(range(8), 0.0), drawn)["x"]
    assert found.interval is not None and found.near is not None and found.p is not None
    assert found.near[0] < 0 < found.interval[0] and 0.035 < found.p < 0.05 and found.verdict == "no better"


@pytest.mark.slow
def test_an_early_look_lets_no_study_call_better_what_it_would_not_have_called_so() -> None:
    """Whatever the truth. Seen to fail where what is given up leaves Holm's procedure."""
    draw, given_up, alarms = random.Random(5), 0, 0
    for number in range(200):
        base, truth = normal(draw, 5), [0.0] * 4 if number % 2 else [draw.choice((-2.0, 0.0, 3.0)) for _ in range(4)]
        variants = {str(k): normal(draw, 5, mean) for k, mean in enumerate(truth)}
        looked, plain = differences(base, variants, look=range(3)), differences(base, variants)
        better = [{name for name, one in found.items() if one.verdict == "better"} for found in (looked, plain)]
        assert better[0] <= better[1]
        assert all(looked[name].p is None or looked[name].p >= one.p - 1e-12 for name, one in plain.items() if one.p is not None)
        given_up += sum(one.given_up for one in looked.values())
        alarms += number % 2 and any(one.verdict == "better" or (one.p is not None and one.p < 0.05) for one in looked.values())
    assert given_up > 20 and alarms <= stats.binom.ppf(0.975, 100, 0.05)


def test_a_look_judges_by_its_seeds_alone_once_all_of_them_are_there() -> None:
    base = dict.fromkeys(range(5), 1.0)
    worse = {0: 2.0, 1: 2.1, 2: 1.9}
    found = [differences(base, {"x": {**worse, **more}}, look=range(3))["x"] for more in ({}, {3: 0.1}, {3: 0.1, 4: math.inf})]
    assert found[0] == found[1] == found[2] and found[0].given_up and found[0].verdict == "no better" and len(found[0].pairs) == 3
    assert found[0].interval == pytest.approx(tuple(stats.ttest_1samp([1.0, 1.1, 0.9], 0).confidence_interval()), rel=1e-9)
    for lacking in (0, 1, 2):
        some = {seed: value for seed, value in {**worse, 3: 2.0, 4: 2.1}.items() if seed != lacking}
        assert not differences(base, {"x": some}, look=range(3))["x"].given_up, "four pairs, and not those of the look"
    assert not differences(base, {"x": {seed: 2 - value for seed, value in worse.items()}}, look=range(3))["x"].given_up, "it is better"


def test_an_effect_is_found_as_often_as_the_power_says() -> None:
    draw = random.Random(0)
    found = sum(differences(normal(draw, 5), {"x": normal(draw, 5, -2.0)})["x"].verdict == "better" for _ in range(300)) / 300
    assert abs(found - power(5, math.sqrt(2), 2.0)) < 3 * math.sqrt(0.25 / 300)


def test_the_seeds_needed_are_the_fewest_with_80_percent_power() -> None:
    assert [seeds_needed(1.0, effect) for effect in (3.4, 2.2, 1.7, 1.2, 1.0, 0.75)] == [3, 4, 5, 8, 10, 16]
    assert seeds_needed(1.0, 0.0) is None and seeds_needed(1.0, 0.01) is None and seeds_needed(0.0, 1.0) == 2
    n = seeds_needed(0.3, 0.1)
    assert n is not None and power(n, 0.3, 0.1) >= 0.8 > power(n - 1, 0.3, 0.1)


def test_noise_is_split_into_what_initial_weights_and_order_contribute() -> None:
    draw = np.random.default_rng(0)
    squares = [draw.normal(0, 3, (3, 1)) + draw.normal(0, 2, (1, 3)) + draw.normal(0, 1, (3, 3)) for _ in range(1500)]
    found = [split_noise(square.tolist()) for square in squares]
    assert np.mean([noise.init**2 for noise in found]) == pytest.approx(9, rel=0.1)
    assert np.mean([noise.order**2 for noise in found]) == pytest.approx(4, rel=0.15)
    assert np.mean([noise.rest**2 for noise in found]) == pytest.approx(1, rel=0.1)


def test_the_interval_of_a_spread_of_nine_runs_holds_it_19_times_in_20() -> None:
    """Within what 500 squares tell, for parts of any share. Seen to fail with the degrees of freedom of nine runs apart."""
    draw = np.random.default_rng(0)
    for init, order, rest in ((1, 1, 1), (3, 0.1, 0.1), (0, 0, 1)):
        squares = [draw.normal(0, init, (3, 1)) + draw.normal(0, order, (1, 3)) + draw.normal(0, rest, (3, 3)) for _ in range(500)]
        found = [split_noise(square.tolist()) for square in squares]
        held = sum(low <= math.hypot(init, order, rest) <= high for low, high in (noise.interval for noise in found))
        assert 0.925 * 500 <= held <= 0.99 * 500
        assert np.mean([noise.total**2 for noise in found]) == pytest.approx(init**2 + order**2 + rest**2, rel=0.12)


def test_pairing_is_the_correlation_over_seeds_and_what_it_saves() -> None:
    draw = random.Random(3)
    base = normal(draw, 8)
    other = {seed: 0.8 * value + 0.5 * draw.gauss(0, 1) for seed, value in base.items()}
    found = differences(base, {"x": {**other, 99: 5.0}})["x"]
    values = [list(each.values()) for each in (base, other)]
    assert found.pairing == pytest.approx(np.corrcoef(*values)[0, 1], rel=1e-9)
    alone = sum(np.var(each, ddof=1) for each in values)
    assert found.apart == round(8 * alone / np.var(np.subtract(*values), ddof=1)) > 8
    assert differences({0: 1.0, 1: 2.0}, {"x": {0: 1.5, 1: 2.1}})["x"].pairing is None, "that of two is always 1"
