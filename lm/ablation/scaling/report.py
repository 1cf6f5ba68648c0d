"""The results of a ladder of sizes, as a tree and as text."""

import math
from collections.abc import Sequence

from lm.ablation.scaling.extrapolate import MOST, Asking, falls, optimum, predicted
from lm.ablation.scaling.fit import EXPONENTS, RESAMPLES, Fit, fit_law
from lm.ablation.scaling.law import Point
from lm.ablation.scaling.runs import Cell, Ladder
from lm.ablation.scaling.scaling_schema import FoundCell, FoundLaw, FoundPoint, FoundScaling, FoundValue
from lm.errors import ConfigError
from lm.report.statistics import ALPHA
from lm.report.tables import in_pipes
from lm.units import fixed, si

_FEW_CELLS, _NARROW = 16, 10  # below so many cells intervals are too narrow; below such a range of sizes or tokens exponents are uncertain
_FLOOR = 0.01  # of the least loss
FORMULA = "L = E + A / N^a + B / D^b"


def scaling(ladder: Ladder, asking: Asking) -> tuple[FoundScaling, Fit | None]:
    """Returns the content of scaling.json, and the fit where there is one; both depend on the runs alone, so that they are the same after a
    kill. Raises ConfigError for questions too far from the law's runs."""
    cells = ladder.cells()
    points = [point for cell in cells for point in cell.points(asking.count)]
    fit, refused = None, ""
    try:
        fit = fit_law(points, RESAMPLES)
    except ConfigError as error:
        refused = str(error)
    optima, far = _optima(fit, points, asking) if fit else ([], [])
    return FoundScaling(
        study=ladder.folder.name,
        hash=ladder.hash,
        metric=ladder.config.metric,
        unit=ladder.unit(ladder.config.metric),
        count=asking.count,
        seeds=ladder.config.seeds,
        level=ALPHA,
        tune=ladder.config.tune,
        cells={cell.name: _cell(ladder, cell, asking, fit) for cell in cells},
        law=_law(fit, points) if fit else None,
        resamples=len(fit.resampled) if fit else 0,
        optima=optima,
        points=[predicted(fit, *pair) for pair in asking.pairs] if fit else [],
        warnings=[*_of_runs(ladder, cells), *([refused] if refused else []), *(_of_fit(fit, points, len(cells)) if fit else []), *far],
    ), fit


def _cell(ladder: Ladder, cell: Cell, asking: Asking, fit: Fit | None) -> FoundCell:
    n, d, tuned = cell.n(asking.count), cell.cost.tokens, ladder.tuned(cell.name)
    return FoundCell(
        size=cell.rung.size,
        times=cell.rung.times,
        n=n,
        tokens=d,
        flops=Point(n, d, 0).flops,
        runs={str(seed): loss if math.isfinite(loss) else None for seed, loss in sorted(cell.losses.items())},
        law=fit.law.loss(n, d) if fit else None,
        tuned=tuned.best if tuned else None,
        at_edge=tuned is not None and tuned.at_edge,
    )


def _law(fit: Fit, points: Sequence[Point]) -> FoundLaw:
    away = [math.log(point.loss / fit.law.loss(point.n, point.d)) for point in points]
    return FoundLaw(
        E=fit.estimate(lambda law: law.E),
        A=fit.estimate(lambda law: law.A),
        B=fit.estimate(lambda law: law.B),
        a=fit.estimate(lambda law: law.a),
        b=fit.estimate(lambda law: law.b),
        n_exponent=fit.estimate(lambda law: law.n_exponent),
        misfit=math.sqrt(sum(each**2 for each in away) / len(away)),
    )


def _optima(fit: Fit, points: Sequence[Point], asking: Asking) -> tuple[list[FoundPoint], list[str]]:
    """Returns the optima for the FLOPs that were asked for, and reasons for missing ones. Without a question the FLOPs are the largest
    run's, and ten times those."""
    if asking.flops:
        return [optimum(fit, points, flops) for flops in asking.flops], []
    largest = max(point.flops for point in points)
    found, refused = [], []
    for flops in (largest, MOST * largest):
        try:
            found.append(optimum(fit, points, flops))
        except ConfigError as error:
            refused.append(str(error))
    return found, refused[:1]


def _of_runs(ladder: Ladder, cells: Sequence[Cell]) -> list[str]:
    config, notes = ladder.config, []
    ended, asked = sum(len(cell.losses) for cell in cells), config.seeds * len(cells)
    if ended < asked:
        notes.append(f"{ended} of {asked} runs have ended. The same command runs the others.")
    for cell in cells:
        if lost := sum(math.isinf(loss) for loss in cell.losses.values()):
            said = "the law is of the others, and says too little of what goes wrong"
            notes.append(f"{cell.name}: {lost} of {len(cell.losses)} runs diverged; {said}. Say tune=optim.lr, or start from a lower rate.")
        if (tuned := ladder.tuned(cell.name)) and tuned.at_edge:
            notes.append(f"{cell.name}: the best {config.tune} lies at the edge of what was tried. Start from another value.")
    if config.tune is None:
        said = "The learning rate is the same for all sizes and lengths, while the best one is not, and what it costs bends the law"
        notes.append(f"{said}. Say tune=optim.lr, five to seven more runs for each of the {len(cells)} pairs.")
    if config.seeds == 1:
        notes.append("There is one seed of each, so what the law misses and what a seed moves look alike. Ask for seeds=3.")
    return notes


def _of_fit(fit: Fit, points: Sequence[Point], n_cells: int) -> list[str]:
    notes = []
    exponents = fit.estimate(lambda law: law.a), fit.estimate(lambda law: law.b)
    for which, name, told, part in zip(("a", "b"), ("sizes", "tokens"), exponents, falls(fit, points), strict=True):
        values = [point.n if which == "a" else point.d for point in points]
        if not part:
            notes.append(f"The losses do not fall with {name}, so {which} says nothing. Spread {name} wider.")
        if max(values) < _NARROW * min(values):
            notes.append(
                f"{name.capitalize()} span a factor of {max(values) / min(values):.3g}, little for an exponent. Give {_NARROW} or more."
            )
        if told.low <= EXPONENTS[0] * 1.01 or told.high >= EXPONENTS[1] * 0.99:
            notes.append(f"The interval of {which} ends where the search does, so the runs do not tell it. Spread {name} wider.")
    if fit.estimate(lambda law: law.E).low < _FLOOR * min(point.loss for point in points):
        notes.append("The interval of E reaches 0: these runs do not tell the loss without end. Ask for longer runs of larger sizes.")
    if n_cells < _FEW_CELLS:
        said = f"{n_cells} pairs of size and tokens are few: intervals of so few come out too narrow"
        notes.append(f"{said}. Give more sizes or lengths, {_FEW_CELLS} pairs in all.")
    n, d = ([point[which] for point in points] for which in (0, 1))
    notes.append(
        f"Shown at {si(min(n))} to {si(max(n))} parameters and {si(min(d))} to {si(max(d))} tokens; laws are known to bend beyond."
    )
    return notes


def tables(found: FoundScaling) -> dict[str, list[tuple[str, ...]]]:
    """Returns the report's tables by title, each with its head first: the law, its predictions, and the runs."""
    told: dict[str, list[tuple[str, ...]]] = {}
    if law := found.law:
        named = {"E, without end": law.E, "A, of size": law.A, "a": law.a, "B, of tokens": law.B, "b": law.b, "b / (a + b)": law.n_exponent}
        told[f"The law: {FORMULA}"] = [("", "value", "95 % interval"), *((name, *_ends(each)) for name, each in named.items())]
    for title, points in (("Best N and D of these FLOPs", found.optima), ("Loss at this N and D", found.points)):
        if points:
            head = ("C = 6 N D, FLOPs", "N, parameters", "D, tokens", "D / N", f"{found.metric}, {found.unit}")
            told[title] = [head, *(_row(point) for point in points)]
    cells: list[tuple[str, ...]] = [("size", "N, parameters", "D, tokens", "C, FLOPs", f"{found.metric}, mean", "law", "away")]
    for cell in found.cells.values():
        ended = [loss for loss in cell.runs.values() if loss is not None]
        mean = sum(ended) / len(ended) if ended else None
        lost = f"{len(cell.runs) - len(ended)} diverged" if len(ended) < len(cell.runs) else "-"
        away = f"{mean / cell.law - 1:+.2%}" if mean is not None and cell.law else lost
        cells.append((cell.size, f"{cell.n:,}", f"{cell.tokens:,}", si(cell.flops), fixed(mean), fixed(cell.law), away))
    return {**told, "The runs": cells}


def sentence(found: FoundScaling) -> str | None:
    """Returns a sentence ready for a paper; None where there is no law."""
    if (law := found.law) is None:
        return None
    n, d = ([getattr(cell, key) for cell in found.cells.values()] for key in ("n", "tokens"))
    a, b, grows, floor = (" ".join(_ends(each)) for each in (law.a, law.b, law.n_exponent, law.E))
    return (
        f"Over {si(min(n))} to {si(max(n))} {_counted(found)} and {si(min(d))} to {si(max(d))} tokens, {found.metric} follows {FORMULA}"
        f" with a = {a}, b = {b}, E = {floor} (95 % intervals, bootstrap over {len(found.cells)} pairs of N and D, {found.seeds} of each;"
        f" misfit {law.misfit:.2%}), so that the best N grows as C to the power {grows}."
    )


def method(found: FoundScaling) -> str:
    """Returns the method section: how the law was fitted, and what that assumes."""
    tuned = f" {found.tune} was tuned for each pair alike." if found.tune else ""
    return (
        f"N are {_counted(found)}, D the tokens that a run has trained on, C = 6 N D; exponents of small models depend on what N counts"
        " (Pearce & Song 2024, arXiv:2406.12907). Every size ran for every length, schedules relative to it."
        f"{tuned} The law is that of Hoffmann et al. 2022 (arXiv:2203.15556, approach 3): Huber's loss of log L, coefficients at least 0,"
        f" exponents from {EXPONENTS[0]:g} to {EXPONENTS[1]:g}, by variable projection. Intervals hold 95 % of {found.resamples} refits to"
        " pairs of N and D that are drawn again, the seeds of a pair together; they say where the law lies if it is true, not how far a"
        f" single run lies from it. Beyond {MOST} times the largest run nothing is said. Ladder {found.hash}."
    )


def report(found: FoundScaling) -> str:
    """Returns report.md."""
    parts = [f"# {found.study}"]
    parts += [f"## {title}\n\n{in_pipes(rows)}" for title, rows in tables(found).items()]
    said = sentence(found)
    parts += [f"> {said}"] if said else []
    parts += ["## Before believing it\n\n" + "\n".join(f"- {warning}" for warning in found.warnings), method(found)]
    return "\n\n".join(parts) + "\n"


def _row(point: FoundPoint) -> tuple[str, ...]:
    n, d, loss = point.n, point.tokens, point.loss
    return (si(point.flops), _sized(n), _sized(d), f"{d.value / n.value:.3g}", f"{loss.value:.4f} [{loss.low:.4f}, {loss.high:.4f}]")


def _sized(each: FoundValue) -> str:
    return si(each.value) if each.low == each.high else f"{si(each.value)} [{si(each.low)}, {si(each.high)}]"


def _ends(each: FoundValue) -> tuple[str, str]:
    return f"{each.value:.4g}", f"[{each.low:.4g}, {each.high:.4g}]"


def _counted(found: FoundScaling) -> str:
    return "non-embedding parameters" if found.count == "non_embedding" else "parameters, embeddings included"
