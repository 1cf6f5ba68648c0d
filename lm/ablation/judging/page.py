"""The results of a study as files: verdict.json for programs, report.md and report.html for people."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from lm.ablation.judging.again import HOW, asked, command, ran
from lm.ablation.judging.verdict import CURVES, Row, method, report, rows, sentences
from lm.ablation.study import Study
from lm.report.curves import settled
from lm.report.frame import render
from lm.report.run import Run
from lm.report.svg import Line, Point, Scale, across, cross, hue, line_chart, sample, scale, symbol, tag, ticks
from lm.schema import Tree
from lm.storage.atomic import replace_file
from lm.units import si

TEMPLATE = Path(__file__).with_name("study.html.j2")
Points = Sequence[tuple[float, float]]
Runs = Mapping[str, Mapping[int, Points]]
"""The curve of each run as points (tokens, value), by variant and seed."""
Curves = Mapping[str, Runs]
"""The runs' curves by metric."""
_ROW, _DOTS, _BAR, _MOST_POINTS = 48.0, 15.0, 38.0, 200
_SKIPPED = 0.25  # first part of a run that charts leave out: its steep fall would squash the differences at the end
_ARROW = "M-5 0L4-5V5z"


def write_report(study: Study, found: Tree) -> None:
    """Writes verdict.json, report.md and report.html beside the runs.  found: the study's verdict."""
    replace_file(study.folder / "verdict.json", json.dumps(found, indent=1, allow_nan=False))
    replace_file(study.folder / "report.md", report(found))
    replace_file(study.folder / "report.html", page(found, curves(study)))


def curves(study: Study) -> Curves:
    """Returns the metrics over training of the compared runs that have ended."""
    found: dict[str, dict[str, dict[int, Points]]] = {key: {} for key in CURVES}
    for name in study.variants:
        for job in study.ended(name):
            folder = study.run_of(job)
            run = Run(folder.path, job.name, {}, folder.metrics.read(), {}, "")
            for key, drawn in found.items():
                drawn.setdefault(name, {})[job.seed] = list(zip(*run.series(key, "tokens"), strict=True))
    return found


def page(found: Tree, drawn: Curves) -> str:
    """Returns report.html.  found: content of verdict.json; drawn: from `curves`."""
    looks = {name: look for look, name in enumerate(sorted(found["variants"], key=lambda name: name != found["baseline"]))}
    ended = sum(len(row["runs"]) for row in found["variants"].values())
    expected = [
        len(told["pairs"]) if told["given_up"] else found["seeds"] for row in found["variants"].values() if (told := row["difference"])
    ]
    return render(
        TEMPLATE,
        found=found,
        progress=f"{ended} of {sum(expected) + max(expected)} runs have ended",
        unit=_told_in(found, found["metric"]),
        legend=[(name, sample(look)) for name, look in looks.items()],
        forest=_forest(found, looks) if ended else None,
        sentences=sentences(found),
        charts=[chart for chart in (_rates(found, looks), _lengths(found, looks), *_losses(found, looks, drawn)) if chart is not None],
        matched=_matched(found),
        method=method(found),
        reproduce={"asked": asked(found), "ran": ran(found), "how": HOW, "command": command(found)},
    )


def _pairs(found: Tree, name: str) -> dict[str, float]:
    """Returns a variant's differences to the baseline by seed; inf where only the variant diverged, -inf where only the baseline did, NaN
    where both did."""
    base, runs = found["variants"][found["baseline"]]["runs"], found["variants"][name]["runs"]
    values = {seed: [math.inf if run is None else run for run in (runs[seed], base[seed])] for seed in runs if seed in base}
    return {seed: mine - theirs for seed, (mine, theirs) in values.items()}


def _forest(found: Tree, looks: Mapping[str, int]) -> Tree:
    """Returns the forest plot: one strip per variant, on a common scale."""
    names = [name for name in looks if name != found["baseline"]]
    dots = [pair for name in names for pair in _pairs(found, name).values() if math.isfinite(pair)]
    near = [0.0, -found["least_effect"], found["least_effect"], *dots]
    low, high = 2 * min(near) - max(near), 2 * max(near) - min(near)
    ends = [end for name in names for end in found["variants"][name]["difference"]["interval"] or ()]
    x = scale([*near, *(min(max(end, low), high) for end in ends)], 0.12)
    told = rows(found)
    strips = [
        {
            "name": name,
            "sample": symbol_of(looks[name]),
            "verdict": told[name].verdict,
            "text": ", ".join([*_told(told[name]), f"n {len(_pairs(found, name))}"]),
            "svg": _strip(found, name, looks[name], x, ", ".join(filter(None, told[name]))),
        }
        for name in names
    ]
    return {"rows": strips, "axis": tag("svg", ticks(x, 4), class_="chart", height=26, aria_hidden="true")}


def _told(row: Row) -> list[str]:
    """Returns what is known of a variant's difference."""
    texts = {"": row.difference, "p ": row.p, "in tokens ": row.worth or "-"}
    return [f"{what}{text}" for what, text in texts.items() if text != "-"]


def symbol_of(look: int) -> str:
    """Returns the marker of a variant as inline SVG, for use in text."""
    return tag("svg", symbol(0.5, 8, look), width=14, height=16, class_="sample", aria_hidden="true")


def _strip(found: Tree, name: str, look: int, x: Scale, label: str) -> str:
    """Returns a variant's strip: its seeds above, their mean with its interval below; values beyond the scale are drawn at its edge."""
    pairs, difference, least = _pairs(found, name), found["variants"][name]["difference"], found["least_effect"]
    back = [tag("line", x1=across(x(value)), x2=across(x(value)), y1=0, y2=_ROW, class_="grid") for value, _ in x.ticks()]
    if least:
        back.append(tag("rect", x=across(x(-least)), width=across(x(least) - x(-least)), y=0, height=_ROW, class_="least"))
    back.append(tag("line", x1=across(x(0)), x2=across(x(0)), y1=0, y2=_ROW, class_="zero"))
    finite = {seed: pair for seed, pair in pairs.items() if math.isfinite(pair)}
    dots = [
        tag("circle", tag("title", f"seed {escape(seed)}: {pair:+.6g}"), cx=across(x(pair)), cy=_DOTS + _aside(i, len(finite)), r=3.5,
            class_=f"dot {hue(look)}")
        for i, (seed, pair) in enumerate(finite.items())
    ]  # fmt: skip
    bar = _bar(difference, look, x) if difference["mean"] is not None else _lost(pairs, look, x, (found["baseline"], name))
    return tag("svg", *back, *dots, *bar, class_="chart strip", height=_ROW, role="img", aria_label=label)


def _lost(pairs: Mapping[str, float], look: int, x: Scale, who: tuple[str, str]) -> list[str]:
    """Returns crosses with counts of diverged pairs: at the left edge the baseline diverged, at the right edge the variant, at 0 both."""
    told, drawn = [str(pair) for pair in pairs.values()], []
    places = (("-inf", 0.0, _BAR, 10, who[0]), ("inf", 1.0, _BAR, -10, who[1]), ("nan", x(0), _DOTS, 10, "both"))
    for which, at, y, aside, name in places:
        if count := told.count(which):
            text = tag("text", f"{count} diverged", x=aside, y=4, text_anchor="start" if aside > 0 else "end")
            drawn += [cross(at, y, look, f"{count} diverged: {name}"), tag("svg", text, x=across(at), y=y, class_="at")]
    return drawn


def _aside(i: int, n: int) -> float:
    """Returns the vertical offset of dot i of n, up to 10 pixels, by the golden ratio, so that near dots do not overlap."""
    return 0.0 if n < 2 else min(10.0, 1.2 * n) * (2 * (i * 0.618034 % 1) - 1)


def _bar(difference: Tree, look: int, x: Scale) -> list[str]:
    low, high = (x(end) for end in difference["interval"])
    drawn = [tag("line", x1=across(max(0.0, low)), x2=across(min(1.0, high)), y1=_BAR, y2=_BAR, class_=f"line {hue(look)}")]
    for at, beyond, turned in ((low, low < 0, 0), (high, high > 1, 180)):
        d, way = (_ARROW, "mark") if beyond else ("M0-4V4", "line")
        path = tag("path", d=d, class_=f"{way} {hue(look)}", transform=f"rotate({turned})")
        drawn.append(tag("svg", path, x=across(min(1.0, max(0.0, at))), y=_BAR, class_="at"))
    return [*drawn, symbol(x(difference["mean"]), _BAR, look, f"mean {difference['mean']:+.6g}", "M0-6L7 0 0 6-7 0z")]


def _rates(found: Tree, looks: Mapping[str, int]) -> Tree | None:
    """Returns the chart of metric against tuned setting. Values far above the best three of every variant are outside the chart."""
    tuned = {name: row["tuned"] for name, row in found["variants"].items() if row["tuned"] is not None}
    tried = {name: {float(value): metric for value, metric in row["tried"].items()} for name, row in tuned.items()}
    points = {name: [(value, *(3 * [metric])) for value, metric in values.items() if metric is not None] for name, values in tried.items()}
    best = [metric for values in points.values() for metric in sorted(metric for _, metric, *_ in values)[:3]]
    if not best:
        return None
    most = min(max(metric for values in points.values() for _, metric, *_ in values), 3 * max(best) - 2 * min(best))
    lost = {name: [value for value, metric in values.items() if metric is None] for name, values in tried.items()}
    lines = [Line(name, looks[name], points[name], tuned[name]["value"], lost[name]) for name in tuned]
    key, metric = (next(iter(tuned.values()))[asked] for asked in ("key", "metric"))
    x = scale([value for values in tried.values() for value in values], log=True)
    return _chart(f"Tuning {key}", _told_in(found, metric), f"{key}, no unit, logarithmic", lines, x, scale([*best, most]))


def _lengths(found: Tree, looks: Mapping[str, int]) -> Tree | None:
    """Returns the chart of metric against tokens: the baseline at each length, and from each variant a line to where the baseline is as
    good."""
    lengths, base = found["exchange"] or {}, found["baseline"]
    ended = {row["tokens"]: [run for run in row["runs"].values() if run is not None] for row in lengths.values()}
    points = [(tokens, sum(runs) / len(runs), min(runs), max(runs)) for tokens, runs in ended.items() if runs]
    if len(points) < 2:
        return None
    own, lines = lengths["1"]["tokens"], [Line(base, looks[base], points)]
    for name, row in found["variants"].items():
        if row["worth"] and row["worth"]["factor"] is not None:
            lines.append(Line(name, looks[name], [(own * factor, *(3 * [row["mean"]])) for factor in (1, row["worth"]["factor"])]))
    y = scale([value for line in lines for _, *values in line.points for value in values])
    x, told = scale(list(ended), log=True), _told_in(found, found["metric"])
    return _chart("Differences in tokens", told, "training tokens, logarithmic", lines, x, y)


def _losses(found: Tree, looks: Mapping[str, int], drawn: Curves) -> list[Tree | None]:
    """Returns charts of the validation metric nearest to the study's, against tokens and FLOPs, and of the training loss."""
    told = [key for key in CURVES if any(points for seeds in drawn.get(key, {}).values() for points in seeds.values())]
    held_out = [key for key in told if key != "loss"]
    key = found["metric"] if found["metric"] in held_out else next(iter(held_out), None)
    asked = [(key, "tokens"), (key, "flops")] if key else []
    asked += [("loss", "tokens")] if "loss" in told else []
    return [_loss(found, looks, drawn[key], key, against) for key, against in asked]


def _loss(found: Tree, looks: Mapping[str, int], drawn: Runs, key: str, against: str) -> Tree | None:
    lines, seen = [], []
    for name, seeds in drawn.items():
        row = found["variants"][name]
        times = row["size"]["flops"] / row["size"]["tokens"] if against == "flops" else 1
        ended = [dict(points) for seed, points in seeds.items() if row["runs"].get(str(seed)) is not None]
        lost = [points[-1][0] * times for seed, points in seeds.items() if row["runs"].get(str(seed)) is None and points]
        band = _band(ended, times)
        lines.append(Line(name, looks[name], band, None, lost))
        for which in (2, 3) if band else ():
            seen += settled([point[0] for point in band], [point[which] for point in band], _SKIPPED)
    places = [at for line in lines for at in (*(at for at, *_ in line.points), *line.lost)]
    if not seen:
        return None
    title = "Training loss" if key == "loss" else "Validation"
    axis = "training FLOPs" if against == "flops" else "training tokens"
    return _chart(f"{title} against {axis}", _told_in(found, key), axis, lines, scale([0.0, *places], 0.02), scale(seen))


def _band(runs: Sequence[Mapping[float, float]], times: float) -> list[Point]:
    """Returns (place, mean, lowest, highest) of several runs at the places where all have a value; where there are many places, neighbours
    are averaged."""
    shared = sorted(set[float].intersection(*map(set, runs))) if runs else []
    wide = -(-len(shared) // _MOST_POINTS)
    pieces = [shared[i : i + wide] for i in range(0, len(shared), wide or 1)]
    found = [(piece, [run[at] for run in runs for at in piece]) for piece in pieces]
    return [(times * sum(piece) / len(piece), sum(values) / len(values), min(values), max(values)) for piece, values in found]


def _told_in(found: Tree, metric: str) -> str:
    return f"{metric}, {found['units'][metric]}"


def _chart(title: str, y_: str, across_: str, lines: Sequence[Line], x: Scale, y: Scale) -> Tree:
    return {"title": title, "y": y_, "x": across_, "svg": line_chart(title, lines, x, y)}


def _matched(found: Tree) -> list[list[str]]:
    base = found["variants"][found["baseline"]]["size"]["parameters"]
    told = rows(found)
    table = [["variant", "parameters", "non-embedding", "training tokens", "training FLOPs", found["knob"] or "knob", "tuned"]]
    for name, row in found["variants"].items():
        cost = row["size"]
        away = f" ({cost['parameters'] / base - 1:+.2%})" if name != found["baseline"] else ""
        sizes = [f"{cost['parameters']:,}{away}", f"{cost['non_embedding']:,}", f"{cost['tokens']:,}", si(cost["flops"])]
        table.append([name, *sizes, "-" if row["knob"] is None else str(row["knob"]), told[name].tuned])
    return table
