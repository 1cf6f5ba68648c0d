"""Charts as inline SVG that fills any width: x is in per cent, y in pixels, so that text keeps its size on every screen.

Series n has its colour from the page's class `hue{n}`, and also a dash and a symbol: no two of the first twelve series share both.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from lm.units import si

HUES = 5  # number of colours, besides the text colour of the page for the first series
HEIGHT = 230
_SYMBOLS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-3.6-3.6h7.2v7.2h-7.2z", "M0-5L4.8 3.6H-4.8z")
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")
_CROSS = "M-4-4L4 4M-4 4L4-4"
Point = tuple[float, float, float, float]
"""(x, y, lowest, highest): the band reaches from lowest to highest; both equal y where there is none."""


@dataclass(frozen=True)
class Scale:
    """Maps low..high to 0..1, linearly or, with `log`, logarithmically."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Returns about five round values within the scale, each with its text."""
        if self.log:
            return [(value, f"{value:g}" if value < 1000 else _text(value, value)) for value in self._decades()]
        least = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * size for size in (1, 2, 5, 10) if power * size >= least * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(i * step, _text(i * step, step)) for i in range(first, last + 1)]

    def _decades(self) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for sizes in ([1], [1, 3], [1, 2, 5], list(range(1, 10))):
            found = [at for power in powers for size in sizes if self.low <= (at := size * 10.0**power) <= self.high]
            if len(found) > 2:
                return found[:: -(-len(found) // 6)]
        return [self.low, self.high]


def scale(values: Sequence[float], margin: float = 0.05, log: bool = False) -> Scale:
    """Returns a scale for these values, with `margin` of their range left free at both ends."""
    low, high = min(values), max(values)
    if log:
        room = (high / low) ** margin if high > low else 1.5
        return Scale(low / room, high * room, log)
    room = (high - low) * margin or abs(high) * margin or 1.0
    return Scale(low - room, high + room)


def _text(value: float, apart: float) -> str:
    """Returns a tick's text, with as many digits as tell ticks at a distance of `apart` from each other."""
    if max(abs(value), apart) >= 1000 and apart >= abs(value) / 100:
        whole, _, prefix = si(value).partition(" ")
        return f"{whole.rstrip('0').rstrip('.') if '.' in whole else whole} {prefix}".rstrip()
    digits = max(0, math.ceil(-math.log10(apart) - 1e-9))
    return (f"{value:,.{digits}f}" if digits <= 5 else f"{value:.3g}").replace("-", "−")


@dataclass(frozen=True)
class Line:
    """A series of a chart.  look: number that decides colour, dash and symbol.  chosen: x of the value that was taken.  lost: x of diverged
    runs, drawn at the top.  dots: positions of the symbols where they are not at the points, as beside a fitted law."""

    name: str
    look: int
    points: Sequence[Point]
    chosen: float | None = None
    lost: Sequence[float] = ()
    dots: Sequence[tuple[float, float]] | None = None


def tag(name: str, *inside: str, **attributes: str | float) -> str:
    """Returns an element; `class_` and `text_anchor` become the attributes class and text-anchor.  inside: markup, not escaped."""
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"' for key, value in attributes.items())
    return f"<{name}{said}>{''.join(inside)}</{name}>"


def across(share: float) -> str:
    """Returns a share as per cent: 0.25 -> '25%'."""
    return f"{_short(100 * share)}%"


def symbol(share: float, y: float, look: int, title: str = "", path: str | None = None) -> str:
    """Returns a series' symbol at a share of the width."""
    drawn = tag("path", d=path or _SYMBOLS[look % len(_SYMBOLS)], class_=f"mark {hue(look)}")
    return tag("svg", tag("title", escape(title)) if title else "", drawn, x=across(share), y=y, class_="at")


def cross(share: float, y: float, look: int, title: str) -> str:
    """Returns the cross that marks a diverged run."""
    drawn = tag("path", d=_CROSS, class_=f"line {hue(look)}")
    return tag("svg", tag("title", escape(title)), drawn, x=across(share), y=y, class_="at")


def hue(look: int) -> str:
    """Returns the colour class of a series: the first has the text colour, the others cycle through the hues."""
    return f"hue{(look - 1) % HUES + 1 if look else 0}"


def sample(look: int) -> str:
    """Returns a series' sample for a legend."""
    line = tag("line", x1=0, x2=34, y1=8, y2=8, class_=f"line {hue(look)}", stroke_dasharray=_DASHES[look % len(_DASHES)])
    return tag("svg", line, symbol(0.5, 8, look), width=34, height=16, class_="sample", aria_hidden="true")


def line_chart(label: str, lines: Sequence[Line], x: Scale, y: Scale) -> str:
    """Returns a chart with numbers on both axes; the page adds the axes' titles.  label: text for screen readers, which are told of each
    series too."""
    grid = [
        tag("line", x1=0, x2="100%", y1=_down(y, value), y2=_down(y, value), class_="grid")
        + tag("text", text, x=-8, y=_short(float(_down(y, value)) + 4), text_anchor="end")
        for value, text in y.ticks()
    ]
    drawn = [_drawn(line, x, y) for line in lines]
    told = in_words(label, map(_told, lines))
    return tag("svg", *grid, ticks(x, HEIGHT), *drawn, class_="chart", height=HEIGHT + 24, role="img", aria_label=told)


def in_words(label: str, series: Iterable[str]) -> str:
    """Returns the text of a chart for those who do not see it."""
    return ": ".join(filter(None, [label, "; ".join(filter(None, series))]))


def from_to(name: str, points: Sequence[tuple[float, float]]) -> str:
    """Returns where a series begins and ends, in words; '' of none.  points: (x, y)."""
    ends = [f"{value:.4g} at {si(at)}" for at, value in (points[:1] if len(points) < 2 else (points[0], points[-1]))]
    return f"{name} {'from ' if len(ends) > 1 else ''}{' to '.join(ends)}" if ends else ""


def _told(line: Line) -> str:
    middle = [(at, mean) for at, mean, _, _ in line.points] or list(line.dots or ())
    chosen = f"{line.name}: {line.chosen:g} was chosen" if line.chosen is not None else ""
    lost = f"{line.name}: {len(line.lost)} diverged" if line.lost else ""
    return "; ".join(filter(None, [from_to(line.name, middle), chosen, lost]))


def ticks(x: Scale, height: float) -> str:
    """Returns the numbers of the x axis, and its line."""
    marks = [tag("line", x1=across(x(value)), x2=across(x(value)), y1=height, y2=height + 4, class_="axis") for value, _ in x.ticks()]
    texts = [tag("text", text, x=across(x(value)), y=height + 18, text_anchor="middle") for value, text in x.ticks()]
    return tag("line", x1=0, x2="100%", y1=height, y2=height, class_="axis") + "".join([*marks, *texts])


def _drawn(line: Line, x: Scale, y: Scale) -> str:
    """Returns a series: its line in a stretched box that clips it, and over it the symbols, which must not be stretched."""
    edge = [(at, high) for at, _, _, high in line.points] + [(at, low) for at, _, low, _ in reversed(line.points)]
    area = tag("polygon", points=_path(edge, x, y), class_=f"area {hue(line.look)}")
    dashes = _DASHES[line.look % len(_DASHES)]
    middle = [(at, mean) for at, mean, _, _ in line.points]
    curve = tag("polyline", points=_path(middle, x, y), class_=f"line {hue(line.look)}", stroke_dasharray=dashes)
    dots = line.dots if line.dots is not None else middle if len(middle) <= 12 else middle[-1:]
    shown = [(at, value) for at, value in dots if 0 <= y(value) <= 1]
    marks = [symbol(x(at), float(_down(y, value)), line.look, f"{line.name}: {value:.6g} at {si(at)}") for at, value in shown]
    lost = [cross(x(at), 6, line.look, f"{line.name}: diverged at {si(at)}") for at in line.lost]
    taken = ""
    if line.chosen is not None:
        place = across(x(line.chosen))
        taken = tag("line", x1=place, x2=place, y1=0, y2=HEIGHT, class_=f"line thin {hue(line.look)}", stroke_dasharray=dashes)
        taken += symbol(x(line.chosen), HEIGHT, line.look, f"{line.name}: {line.chosen:g} was chosen")
    box = tag("svg", area, curve, width="100%", height=HEIGHT, viewBox=f"0 0 1000 {HEIGHT}", preserveAspectRatio="none")
    return box + taken + "".join([*marks, *lost])


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    return " ".join(f"{_short(1000 * x(at))},{_down(y, value)}" for at, value in points)


def _down(y: Scale, value: float) -> str:
    return _short(HEIGHT * (1 - y(value)))


def _short(value: str | float) -> str:
    """Returns a number as text with at most three decimals: a thousandth of a pixel, or of a per cent."""
    return value if isinstance(value, str) else f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
