"""The results of a ladder of sizes as files: scaling.json for programs, report.md and report.html for people."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lm.ablation.scaling.extrapolate import MOST, Asking, optimum, predicted
from lm.ablation.scaling.fit import Fit
from lm.ablation.scaling.law import Point
from lm.ablation.scaling.report import method, report, scaling, sentence, tables
from lm.ablation.scaling.runs import Ladder
from lm.ablation.scaling.scaling_schema import FoundScaling, FoundValue
from lm.errors import ConfigError
from lm.report.frame import render
from lm.report.svg import Line, line_chart, sample, scale
from lm.schema import Tree
from lm.storage.atomic import replace_file
from lm.units import counted, si

TEMPLATE = Path(__file__).with_name("ladder.html.j2")
_DRAWN = 24  # points of a curve


def write_report(ladder: Ladder, asking: Asking) -> FoundScaling:
    """Writes scaling.json, report.md and report.html beside the runs; returns the content of scaling.json."""
    found, fit = scaling(ladder, asking)
    replace_file(ladder.folder / "scaling.json", json.dumps(found.tree(), indent=1, allow_nan=False))
    replace_file(ladder.folder / "report.md", report(found))
    replace_file(ladder.folder / "report.html", page(found, fit))
    return found


def page(found: FoundScaling, fit: Fit | None) -> str:
    """Returns report.html.  fit: the fit from which `found` was made; None where there is no law."""
    ended, asked = sum(len(cell.runs) for cell in found.cells.values()), found.seeds * len(found.cells)
    return render(
        TEMPLATE,
        found=found,
        progress=f"{ended} of {counted(asked, 'run')} {'has' if ended == 1 else 'have'} ended",
        sentence=sentence(found),
        charts=[*_losses(found, fit), *(_optima(found, fit) if fit else ())],
        tables=tables(found),
        method=method(found),
    )


def _losses(found: FoundScaling, fit: Fit | None) -> list[Tree]:
    """Returns charts of the losses against size, with a line for each number of tokens, and against tokens, with a line for each size."""
    runs, charts = _runs(found), []
    n = "parameters" if found.count == "parameters" else "non-embedding parameters"
    for title, axis, other, along in (("Loss against size", f"N, {n}", "tokens", 0), ("Loss against tokens", "D, tokens", n, 1)):
        places = sorted({run[along] for run in runs})
        reach = [float(at) for at in np.geomspace(places[0], places[-1], _DRAWN)] if fit else []
        lines = []
        for look, fixed in enumerate(sorted({run[1 - along] for run in runs})):
            mine = [run for run in runs if run[1 - along] == fixed]
            told = [predicted(fit, *((at, fixed) if along == 0 else (fixed, at))).loss for at in reach] if fit else []
            curve = [(at, *_band(loss)) for at, loss in zip(reach, told, strict=True)]
            lost = [run[along] for run in mine if math.isinf(run.loss)]
            lines.append(
                Line(f"{si(fixed)} {other}", look, curve, None, lost, [(run[along], run.loss) for run in mine if math.isfinite(run.loss)])
            )
        charts.append(_chart(title, f"{found.metric}, {found.unit}", f"{axis}, logarithmic", lines))
    return [chart for chart in charts if chart is not None]


def _runs(found: FoundScaling) -> list[Point]:
    """Returns all ended runs as points; the loss is infinite where a run diverged."""
    cells = found.cells.values()
    return [Point(cell.n, cell.tokens, math.inf if loss is None else loss) for cell in cells for loss in cell.runs.values()]


def _optima(found: FoundScaling, fit: Fit) -> list[Tree]:
    """Returns charts of the least loss, and the best N and D, against FLOPs, as far as the law may be extrapolated."""
    runs = [run for run in _runs(found) if math.isfinite(run.loss)]
    reach = [run.flops for run in runs]
    best = []
    for flops in np.geomspace(min(reach), MOST * max(reach), _DRAWN):
        try:
            best.append(optimum(fit, runs, float(flops)))
        except ConfigError:
            continue
    if not best:
        return []
    loss = [Line("best N and D", 0, [(at.flops, *_band(at.loss)) for at in best], dots=[])]
    loss.append(Line("runs", 1, [], dots=[(run.flops, run.loss) for run in runs]))
    sizes = [Line("N, parameters", 0, [(at.flops, *_band(at.n)) for at in best], dots=[])]
    sizes.append(Line("D, tokens", 1, [(at.flops, *_band(at.tokens)) for at in best], dots=[]))
    axis = "C = 6 N D, training FLOPs, logarithmic"
    charts = [_chart("Least loss against FLOPs", f"{found.metric}, {found.unit}", axis, loss)]
    charts.append(_chart("Best size and tokens against FLOPs", "parameters, or tokens, logarithmic", axis, sizes, log=True))
    return [chart for chart in charts if chart is not None]


def _band(each: FoundValue) -> tuple[float, float, float]:
    return each.value, each.low, each.high


def _chart(title: str, y: str, x: str, lines: Sequence[Line], log: bool = False) -> Tree | None:
    """Returns a chart, None where there is nothing to draw. x is logarithmic, and y if `log`; bands may reach beyond the chart."""
    dots = [dot for line in lines for dot in line.dots or ()]
    curve = [point[:2] for line in lines for point in line.points]
    if not (seen := [*dots, *curve]):
        return None
    places = [at for at, _ in seen] + [at for line in lines for at in line.lost]
    drawn = line_chart(title, lines, scale(places, log=True), scale([value for _, value in seen], 0.1, log))
    return {"title": title, "y": y, "x": x, "svg": drawn, "legend": [(line.name, sample(line.look)) for line in lines]}
