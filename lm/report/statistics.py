"""Statistics of differences between runs: paired by seed, corrected for the number of variants, with one of four verdicts."""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

Verdict = Literal["better", "no better", "equal within", "cannot tell"]
Interval = tuple[float, float]
Sums = Sequence[tuple[float, float]]
S = TypeVar("S", int, str)  # a seed

ALPHA = 0.05
POWER = 0.8
_GRID = 2001  # factors that are tried: from 0.5 to 2 they are 0.07 % apart
MOST_SEEDS = 999
_CORRELATED_FROM, _PERMUTED_FROM, _RESAMPLED_FROM = 3, 6, 10  # least pairs: two always correlate by 1; fewer than the others give no result
# reaches 5 %, and a bootstrap is too narrow


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference variant - baseline of a metric of which less is better.

    pairs: differences by seed, ascending seeds that both have; inf where only the variant diverged, -inf where only the baseline did, NaN
    where both did, which is no difference of 0.
    interval: Student's t, at the level that Holm's procedure leaves this variant.  near: misses in 10 % / variants, for two one-sided tests
    of equivalence. Both are None, like the mean, where a pair is not finite, or there are fewer than two.  p: of the same test as the
    interval, or of the sign test where a pair is not finite, corrected by Holm; None of fewer than two pairs.
    permutation_p: exact, over all signs, from 6 pairs on.  bootstrap: BCa at the same level, from 10 pairs on.  more_seeds: further seeds
    that would decide with 80 % power, by the spread so far; None: no number would.  pairing: correlation of baseline and variant over
    seeds, from 3 pairs on.  apart: unpaired seeds that would give the same precision.  given_up: these pairs led to giving the variant up
    at an early look, which is no test and has no p.
    """

    pairs: tuple[float, ...]
    mean: float | None = None
    interval: Interval | None = None
    near: Interval | None = None
    p: float | None = None
    permutation_p: float | None = None
    bootstrap: Interval | None = None
    verdict: Verdict
    more_seeds: int | None
    level: float
    """Probability with which the interval misses the true mean."""
    pairing: float | None = None
    apart: int | None = None
    given_up: bool = False


def differences(
    baseline: Mapping[S, float], variants: Mapping[str, Mapping[S, float]], least_effect: float = 0.0, look: Collection[S] = ()
) -> dict[str, Difference]:
    """Compares each variant with the baseline, by the seeds that both have.

    baseline, each variant: the metric by seed, infinite where the run diverged.  least_effect: the smallest difference worth acting on.
    look: the first seeds, two or more. A variant no better by them, at 5 % / variants, is given up, and judged by these seeds alone.
    p holds for all variants together: if all are equal, at most 5 % of studies raise any alarm (Holm 1979). An interval's level agrees with
    its p: each interval alone misses the truth in at most 5 % of studies, and without a look so do all together if the variants are equal.
    A look costs no error rate: a variant given up stays in Holm's procedure as never rejected, so that the others are judged as strictly as
    before, and the only verdict that it has lost is "better".
    """
    given_up = dict(_given_up(baseline, variants, least_effect, look))
    pairs = {name: _pairs(baseline, found) for name, found in variants.items()}
    asked = {name: len(found) > 1 and name not in given_up for name, found in pairs.items()}  # the others count, as never rejected
    corrected, levels = holm({name: p_value(found) if asked[name] else 1.0 for name, found in pairs.items()})
    judged = {
        name: given_up.get(name) or _judged(found, corrected.get(name, 1.0), levels.get(name, ALPHA), least_effect, len(variants))
        for name, found in pairs.items()
    }
    return {name: replace(found, **_pairing(baseline, variants[name], found.pairs)) for name, found in judged.items()}


def _given_up(
    baseline: Mapping[S, float], variants: Mapping[str, Mapping[S, float]], least_effect: float, look: Collection[S]
) -> Iterator[tuple[str, Difference]]:
    for name, found in variants.items():
        if look and all(seed in baseline and seed in found for seed in look):
            pairs = _pairs({seed: baseline[seed] for seed in look}, found)
            early = _judged(pairs, min(1.0, p_value(pairs) * len(variants)), ALPHA / len(variants), least_effect, len(variants))
            if early.verdict == "no better":
                yield name, replace(early, p=None, given_up=True)


def holm(ps: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns each p corrected for the number of tests, and the level of the interval that agrees with it.  Holm 1979."""
    corrected, levels, worst, level = {}, {}, 0.0, ALPHA / max(1, len(ps))
    for rank, name in enumerate(sorted(ps, key=lambda name: ps[name])):
        left = len(ps) - rank
        level = ALPHA / left if worst < ALPHA else level  # after the first test that is not rejected, all others have its level
        worst = max(worst, min(1.0, ps[name] * left))
        corrected[name], levels[name] = worst, level
    return corrected, levels


def text_error(baseline: Sums, variant: Sums) -> float:
    """Returns the standard error of variant - baseline, where each is a ratio of sums over the same clusters of text.

    baseline, variant: numerator and denominator of each cluster. The ratios are linearized, so that a cluster's contributions to both are
    taken together (Cochran 1977, ch. 6), with n / (n - 1) for n clusters.
    """
    parts, n = [], len(baseline)
    for sign, sums in ((-1, baseline), (1, variant)):
        whole = math.fsum(size for _, size in sums)
        ratio = math.fsum(value for value, _ in sums) / whole
        parts.append([sign * (value - ratio * size) / whole for value, size in sums])
    return math.sqrt(n / (n - 1) * math.fsum((own + other) ** 2 for own, other in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Worth:
    """The factor on its tokens with which the baseline would reach a variant's metric.

    factor: None where it lies beyond the factors that were run.  interval: factors at which baseline and variant cannot be told apart; an
    end is None where it lies beyond the factors that were run.
    """

    factor: float | None
    interval: tuple[float | None, float | None]


def worth(baseline: Mapping[float, Mapping[S, float]], variant: Mapping[S, float], level: float) -> Worth | None:
    """Returns the factor at which the baseline's metric, interpolated linearly in log tokens, equals the variant's.

    baseline: metric by seed, by factor on the tokens trained on.  A factor is in the interval if Student's t of variant - baseline at that
    factor, paired by seed, is below its limit; so 1 is in it exactly if 0 is in the interval of the difference (Fieller 1954). Returns None
    where fewer than two seeds have all runs, one of them diverged, or more tokens do not lower the mean.
    """
    import numpy as np

    factors = sorted(baseline)
    seeds = sorted(variant.keys() & set.intersection(*(set(runs) for runs in baseline.values())))
    curves: Any = np.array([[baseline[factor][seed] for factor in factors] for seed in seeds])
    own: Any = np.array([variant[seed] for seed in seeds])
    if len(seeds) < 2 or not np.isfinite([*own, *curves.ravel()]).all() or (np.diff(curves.mean(0)) >= 0).any():
        return None
    places: Any = np.log(factors)
    mean = curves.mean(0)
    here = float(np.interp(-own.mean(), -mean, places))
    inside = mean[-1] <= own.mean() <= mean[0]
    grid = np.unique([*np.linspace(places[0], places[-1], _GRID), *places, here])
    apart = own[:, None] - np.stack([np.interp(grid, places, curve) for curve in curves])
    alike = np.abs(apart.mean(0)) <= t_limit(level, len(seeds)) * apart.std(0, ddof=1) / math.sqrt(len(seeds))
    among = grid[alike | (inside & (grid == here))]
    if not len(among):
        return Worth(None, (factors[-1], None) if own.mean() < mean[-1] else (None, factors[0]))
    low, high = (None if end == edge else math.exp(end) for end, edge in ((among[0], grid[0]), (among[-1], grid[-1])))
    return Worth(math.exp(here) if inside else None, (low, high))


def power(n: int, sd: float, effect: float, alpha: float = ALPHA) -> float:
    """Returns the power of a paired t-test of n seeds for an effect, by the noncentral F distribution.  sd: of the differences."""
    from scipy import special

    limit = special.stdtrit(n - 1, 1 - alpha / 2) ** 2
    return float(1 - special.ncfdtr(1, n - 1, n * (effect / sd) ** 2, limit))  # of t^2, as noncentral F never overflows


def seeds_needed(sd: float, effect: float, alpha: float = ALPHA, wanted: float = POWER) -> int | None:
    """Returns how many seeds find an effect with the wanted power; None where more than 999 are needed, as for an effect of 0.  sd: of the
    differences."""
    from scipy import special

    if sd <= 0:
        return 2 if effect else None
    bound = float(special.ndtri(1 - alpha / 2) + special.ndtri(wanted)) * sd  # as if the spread were known, so a lower bound
    if abs(effect) * math.sqrt(MOST_SEEDS) < bound:
        return None
    n = max(2, int((bound / effect) ** 2))
    while power(n, sd, effect, alpha) < wanted:
        n += 1
    return n


def pairing(baseline: float, variant: float, difference: float) -> float | None:
    """Returns the correlation of runs with equal seeds, from their standard deviations and that of their difference; None where the
    baseline or the variant has no spread."""
    return (baseline**2 + variant**2 - difference**2) / (2 * baseline * variant) if baseline > 0 and variant > 0 else None


def _pairs(baseline: Mapping[S, float], variant: Mapping[S, float]) -> list[float]:
    shared = sorted(baseline.keys() & variant.keys())
    return [variant[seed] - baseline[seed] for seed in shared]


def _pairing(baseline: Mapping[S, float], variant: Mapping[S, float], pairs: Sequence[float]) -> dict[str, Any]:
    """Returns the fields `pairing` and `apart` of a Difference.  pairs: of the first seeds that both have."""
    if len(pairs) < _CORRELATED_FROM or not all(map(math.isfinite, pairs)):
        return {}
    shared = sorted(baseline.keys() & variant.keys())[: len(pairs)]
    base, own, both = (statistics.stdev(each) for each in ([baseline[seed] for seed in shared], [variant[seed] for seed in shared], pairs))
    apart = round(len(pairs) * (base**2 + own**2) / both**2) if both**2 * MOST_SEEDS > base**2 + own**2 else None
    return {"pairing": pairing(base, own, both), "apart": apart}


def p_value(pairs: Sequence[float]) -> float:
    """Returns the two-sided p of a difference of 0 by Student's t; by the sign test where a run diverged, since that needs no numbers."""
    if not all(map(math.isfinite, pairs)):
        return _sign_p(pairs)
    mean, sd = statistics.fmean(pairs), statistics.stdev(pairs)
    if sd == 0:
        return float(mean == 0)
    from scipy import special

    return float(2 * special.stdtr(len(pairs) - 1, -abs(mean) / sd * math.sqrt(len(pairs))))


def _sign_p(pairs: Sequence[float]) -> float:
    """Returns p of the exact sign test, which needs only the worse run of each pair; ties do not count."""
    from scipy import stats

    told = [pair for pair in pairs if abs(pair) > 0]
    return float(stats.binomtest(sum(pair > 0 for pair in told), len(told)).pvalue) if told else 1.0


def _judged(pairs: Sequence[float], p: float, level: float, least_effect: float, variants: int) -> Difference:
    if len(pairs) < 2 or not all(map(math.isfinite, pairs)):
        worse = sum(pair > 0 for pair in pairs) > sum(pair < 0 for pair in pairs)
        verdict: Verdict = "cannot tell" if p >= ALPHA or len(pairs) < 2 else "no better" if worse else "better"
        more = _more_signs(pairs, level) if verdict == "cannot tell" else None
        return Difference(pairs=tuple(pairs), p=p if len(pairs) > 1 else None, verdict=verdict, more_seeds=more, level=level)
    interval, near = interval_of(pairs, level), interval_of(pairs, 2 * ALPHA / variants)
    if least_effect and max(map(abs, near)) < least_effect:
        verdict = "equal within"
    elif interval[1] < 0:
        verdict = "better"
    elif interval[0] > 0 or min(interval[0], near[0]) > -least_effect:  # for the latter Holm's later levels are too wide
        verdict = "no better"
    else:
        verdict = "cannot tell"
    more = _more_seeds(pairs, level, least_effect, variants) if verdict == "cannot tell" else None
    return Difference(
        pairs=tuple(pairs), mean=statistics.fmean(pairs), interval=interval, near=near, p=p, permutation_p=_permutation_p(pairs),
        bootstrap=_bootstrap(pairs, level), verdict=verdict, more_seeds=more, level=level,
    )  # fmt: skip


def interval_of(pairs: Sequence[float], level: float) -> Interval:
    """Returns Student's t interval of the mean difference, which misses the true mean with this probability."""
    mean, n = statistics.fmean(pairs), len(pairs)
    half = t_limit(level, n) * statistics.stdev(pairs) / math.sqrt(n)
    return mean - half, mean + half


def t_limit(level: float, n: int) -> float:
    """Returns the limit that |t| of n values exceeds with probability `level`."""
    from scipy import special

    return float(special.stdtrit(n - 1, 1 - level / 2))


def _more_signs(pairs: Sequence[float], level: float) -> int | None:
    """Returns the further seeds until the sign test is significant, if all further pairs have these signs; None where signs differ."""
    told = [pair for pair in pairs if abs(pair) > 0]
    if len(pairs) < 2 or not told or len({pair > 0 for pair in told}) > 1:
        return None
    return max(1, math.ceil(math.log2(2 / level)) - len(told))


def _more_seeds(pairs: Sequence[float], level: float, least_effect: float, variants: int) -> int | None:
    """Returns the further seeds until, if the difference is what it seems, it is found, a gain of the least effect is excluded, or it is
    shown to be below the least effect, for which both ends must be excluded; None where no number suffices."""
    sd, mean = statistics.stdev(pairs), statistics.fmean(pairs)
    near = 2 * ALPHA / variants
    enough = [seeds_needed(sd, mean, level)]
    if mean > 0:
        enough.append(seeds_needed(sd, mean + least_effect, min(level, near)))
    if least_effect > abs(mean):
        enough.append(seeds_needed(sd, least_effect - abs(mean), near, (1 + POWER) / 2))
    known = [n for n in enough if n is not None]
    return max(1, min(known) - len(pairs)) if known else None


def _permutation_p(pairs: Sequence[float]) -> float | None:
    if not _PERMUTED_FROM <= len(pairs) <= 20:
        return None
    import numpy as np

    sums: Any = np.zeros(1)
    for pair in pairs:  # all 2^n sums, an array of 8 MiB at most
        sums = np.concatenate([sums - pair, sums + pair])
    own = sums[-1]
    near = 100 * np.finfo(float).eps * np.abs(pairs).sum()  # equal but for rounding
    return float(min(1.0, 2 * min((sums <= own + near).mean(), (sums >= own - near).mean())))


def _bootstrap(pairs: Sequence[float], level: float) -> Interval | None:
    if len(pairs) < _RESAMPLED_FROM or len(set(pairs)) < 2:
        return None
    import numpy as np
    from scipy import stats

    found: Any = stats.bootstrap((np.array(pairs),), np.mean, confidence_level=1 - level, method="BCa", rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
