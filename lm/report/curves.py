"""Charts of runs: inline SVG that takes its colours from the page, and PNG. Only this module imports matplotlib."""

import re
import statistics
from collections.abc import Callable, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.report.collect import Comparison, Row, texts
from lm.report.run import Axis, Run
from lm.report.svg import from_to, in_words
from lm.units import duration, fixed, si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that stand for the page's own, so that one SVG reads on light and dark screens.
INK, FIRST, SECOND = "#010101", "#010102", "#010103"
PAGE = {INK: "currentColor", FIRST: "var(--first)", SECOND: "var(--second)"}
PLAIN_AXES: dict[Any, Any] = {"axes.grid": True, "grid.alpha": 0.12, "axes.spines.top": False, "axes.spines.right": False}
ZLIB = "zlib level 9"
_PARTS = 4096


def curves(run: Run) -> list[tuple[str, str]]:
    """Returns (title, inline SVG) of each quantity that the run's metrics contain."""
    charts = {
        f"Loss, {run.measure.unit('loss')}": (_with_held_out, "loss"),
        "Reward": (_with_held_out, "reward"),
        "Accuracy": (_with_held_out, "accuracy"),
        "Margin of pairs": (_with_held_out, "margin"),
        "Validation bits per byte": (_bits, "val_bits_per_byte"),
        "Learning rate": (_plain, "lr"),
        "Gradient norm": (_smoothed, "grad_norm"),
        "Load of the busiest expert, over the mean": (_plain, "expert_load"),
        "Loss of the routers": (_smoothed, "router_loss"),
        "Loss of the indexers": (_smoothed, "indexer_loss"),
        "Tokens per second": (_plain, "tokens_per_second"),
    }
    return [
        (title, _svg(title, draw, run, key)) for title, (draw, key) in charts.items() if run.series(key)[0] or run.series(f"val_{key}")[0]
    ]


AXES: dict[Axis, str] = {"step": "step", "tokens": "tokens", "flops": "training FLOPs", "time": "training time"}


def unplotted(comparison: Comparison) -> list[str]:
    """Returns notes on runs that have no known values on the axis."""
    runs = [run for row in comparison.rows for run in row.runs]
    names = [run.name for run in runs if run.series(comparison.metric)[0] and not run.series(comparison.metric, comparison.x)[0]]
    return [f"Not in the picture, since {AXES[comparison.x]} are not known of them yet: {', '.join(names)}."] if names else []


def comparison_png(comparison: Comparison, path: Path) -> None:
    """Draws the validation metric, one colour per row: a line, or for several seeds their mean with a band of its standard
    error."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False, "figure.dpi": 150, **PLAIN_AXES}):
        figure = Figure(figsize=(8.0, 4.5 + 0.22 * len(comparison.rows)), layout="constrained")
        _compare(figure, comparison)
        figure.savefig(path, format="png", metadata={"Software": None})


def _compare(figure: "Figure", comparison: Comparison) -> None:
    axes = figure.add_subplot()
    late: list[float] = []
    for number, row in enumerate(comparison.rows):
        look: dict[str, Any] = {"color": f"C{number % 10}", "zorder": 3 - number / 1000}
        x, y, error = _mean(row, comparison.metric, comparison.x)
        style = ("-", "--", ":", "-.")[number % 4]  # so that no two of twenty share colour and dash, and neighbours neither
        axes.plot(x, y, linewidth=1.6, marker=_marker(x), markersize=4, linestyle=style, label=_label(row, comparison), **look)
        low, high = ([value + sign * off for value, off in zip(y, error, strict=True)] for sign in (-1, 1))
        if any(error):
            axes.fill_between(x, low, high, alpha=0.2, linewidth=0, **look)
        late += settled(x, low) + settled(x, high)
    zlib = texts(run for row in comparison.rows for run in row.runs)
    if comparison.metric == "val_bits_per_byte" and len(zlib) == 1:
        (bits,) = zlib
        axes.axhline(bits, color="0.5", linestyle="--", linewidth=1, label=f"{ZLIB}: {fixed(bits)}")
        near = late and abs(bits - statistics.fmean(late)) < max(late) - min(late)
        late += [bits] if near else []
    _limit(axes, late)
    axes.set_ylabel(comparison.title.replace("val", "validation"))
    axes.set_xlabel(AXES[comparison.x])
    axes.xaxis.set_major_formatter(_time_tick if comparison.x == "time" else _tick)
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize="small")


def _mean(row: Row, metric: str, against: Axis) -> tuple[list[float], list[float], list[float]]:
    """Returns x, mean and standard error over a row's seeds, at the steps that all seeds have validated; the error is 0 for one seed."""
    known = [points for run in row.runs if (points := run.points(metric, against))] or [{}]
    shared = [[points[step] for points in known] for step in sorted(set[int].intersection(*map(set, known)))]
    x, y = ([statistics.fmean(point[which] for point in points) for points in shared] for which in (0, 1))
    error = [statistics.stdev(value for _, value in points) / len(known) ** 0.5 if len(known) > 1 else 0.0 for points in shared]
    return x, y, error


def _label(row: Row, comparison: Comparison) -> str:
    pairs = [f"{key}={value}" for key, value in zip(comparison.keys, comparison.changes(row), strict=True) if value != "-"]
    name = ", ".join(pairs) if 0 < len(pairs) <= 3 else row.name
    return f"{name}: {fixed(row.mean(comparison.metric), row.error(comparison.metric))}"


def settled(x: list[float], y: list[float], skipped: float = 0.1) -> list[float]:
    """Returns the values after the first part of the run, whose steep fall would squash the rest of the chart."""
    return [value for at, value in zip(x, y, strict=True) if at >= skipped * x[-1]]


def _limit(axes: "Axes", values: list[float]) -> None:
    if len(values) > 2 and max(values) > min(values):
        margin = 0.05 * (max(values) - min(values))
        axes.set_ylim(min(values) - margin, max(values) + margin)


def _with_held_out(axes: "Axes", run: Run, key: str) -> None:
    """Draws a figure of training with that of the held-out rows; of the loss this is what training is on."""
    _smoothed(axes, run, key, "train")
    seen = settled(*run.series(key), 0.02)
    x, y = run.series(f"val_{run.measure.learned if key == 'loss' else key}")
    if x:
        look: dict[str, Any] = {"color": SECOND, "linewidth": 1.2, "linestyle": "--", "marker": _marker(x, 30), "markersize": 3.5}
        axes.plot(x, y, label="validation", **look)
    _limit(axes, seen + settled(x, y, 0.02))
    axes.legend(frameon=False)


def _bits(axes: "Axes", run: Run, key: str) -> None:
    x, y = run.series(key)
    axes.plot(x, y, color=SECOND, linewidth=1.4, marker=_marker(x, 30), markersize=3.5, label="this model")
    zlib = run.number("zlib_bits_per_byte")
    if zlib is not None:
        axes.axhline(zlib, color=INK, linestyle="--", linewidth=1, alpha=0.7, label=ZLIB)
    axes.legend(frameon=False)


def _plain(axes: "Axes", run: Run, key: str) -> None:
    x, y = run.series(key)
    at = visible(y)
    axes.plot(np.array(x)[at], np.array(y)[at], color=FIRST, linewidth=1.4, marker=_marker(x), markersize=4)
    axes.set_ylim(0, 1.08 * max(y) or 1)
    axes.yaxis.set_major_formatter(_tick)


def _smoothed(axes: "Axes", run: Run, key: str, label: str | None = None) -> None:
    x, y = run.series(key)
    at = visible(y)
    axes.plot(np.array(x)[at], np.array(y)[at], color=FIRST, linewidth=0.7, alpha=0.35, marker=_marker(x), markersize=4)
    axes.plot(np.array(x)[at], _smooth(y)[at], color=FIRST, linewidth=1.6, label=label)
    _limit(axes, settled(x, y))


def _tick(value: float, position: float) -> str:
    return si(value)


def _time_tick(value: float, position: float) -> str:
    return duration(value)


def _marker(x: list[float], most: int = 2) -> str:
    return "o" if len(x) <= most else ""


def visible(y: Sequence[float]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Returns where the points lie that a chart shows of a long curve: the least and the greatest of each of many parts, and its ends."""
    at = np.arange(len(y))
    if len(y) <= 2 * _PARTS:
        return at
    parts = at[: len(y) // _PARTS * _PARTS].reshape(_PARTS, -1)
    values = np.array(y)[parts]
    ends = [found(values, axis=1) + parts[:, 0] for found in (np.argmin, np.argmax)]
    return np.unique(np.concatenate([*ends, at[parts.size :], at[:1]]))


def _smooth(y: Sequence[float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Returns the mean over a centred window of a 25th of the curve, shorter at its ends."""
    totals, at, half = np.cumsum([0.0, *y]), np.arange(len(y)), len(y) // 50
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(y))
    return (totals[high] - totals[low]) / (high - low)


def _svg(title: str, draw: "Callable[[Axes, Run, str], None]", run: Run, key: str) -> str:
    """Returns a bare <svg>: the same bytes for the same run, text as text, without metadata and external references."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color", "legend.labelcolor")
    ink: dict[Any, Any] = dict.fromkeys(inked, INK)
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "none", "font.size": 9, **ink, **PLAIN_AXES}):
        figure = Figure(figsize=(5.4, 2.9), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, run, key)
        axes.set_xlabel("step")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        text = StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg[svg.index("<svg") :])
    svg = re.sub(r"font-family: [^;]*; ", "", svg)
    for stand_in, colour in PAGE.items():
        svg = svg.replace(stand_in, colour)
    told = {"this run": run.series(key), "validation": run.series(f"val_{run.measure.learned if key == 'loss' else key}")}
    label = escape(in_words(f"{title}, by step", (from_to(name, [*zip(*xy, strict=True)]) for name, xy in told.items())))
    return re.sub(r'width="[^"]*" height="[^"]*"|height="[^"]*" width="[^"]*"', f'role="img" aria-label="{label}"', svg, count=1)
