"""The page of a study, from trees as verdict.json has them: where each seed lies, what is escaped, and that extremes are drawn."""

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import asdict
from xml.etree import ElementTree

import pytest

from lm.ablation.judging.page import page
from lm.ablation.judging.verdict import cells
from lm.report.statistics import differences
from lm.report.svg import scale
from lm.schema import Tree
from tests.report.test_page import Page

Runs = dict[str, dict[int, float]]
Curves = dict[str, dict[str, dict[int, list[tuple[float, float]]]]]


def tree(runs: Runs, least_effect: float = 0.01, tried: Tree | None = None, seeds: int | None = None, exchange: Tree | None = None) -> Tree:
    """As of a study of these results, inf where a run diverged; the first is the baseline.  exchange: it at other lengths."""
    baseline, *others = runs
    found = differences(runs[baseline], {name: runs[name] for name in others}, least_effect)
    told = {name: json.loads(re.sub(r"-?Infinity|NaN", "null", json.dumps(asdict(one)))) for name, one in found.items()}
    tuned = {"key": "optim.lr", "metric": "val_bits_per_byte", "value": 0.00225, "at_edge": False, "tried": tried} if tried else None
    rows = {
        name: {
            "overrides": [f"model/ffn={name}"],
            "runs": {str(seed): value if math.isfinite(value) else None for seed, value in sorted(values.items())},
            "diverged": sum(map(math.isinf, values.values())),
            "mean": None,
            "tuned": tuned,
            "tuning": None,
            "size": {"parameters": 45_184, "non_embedding": 34_944, "tokens": 30_720, "flops": 9_060_000_000},
            "knob": None,
            "step_s": None,
            "difference": told.get(name),
            "text": None,
            "worth": {"factor": 0.8, "interval": [None, 1.1]} if exchange and name in told else None,
            "failed": None,
        }
        for name, values in runs.items()
    }
    most = max((len(values) for values in runs.values()), default=0)
    asked = {
        "metric": "val_bits_per_byte",
        "units": {"val_bits_per_byte": "bits/byte", "val_loss": "nats/token", "loss": "nats/token"},
        "baseline": baseline,
        "match": "tokens",
        "knob": None,
        "step_s": None,
        "least_effect": least_effect,
    }
    return {
        "study": "s",
        "hash": "0" * 16,
        **asked,
        "seeds": seeds or most,
        "give_up_after": None,
        "level": 0.05,
        "exchange": exchange,
        "overrides": ["recipes=ablation/base", "data.files=a b.txt"],
        "plugins": {"mine": "0" * 64},
        "copies": ["plugins/mine.py"],
        "made_by": {"device": ["x86_64 CPU"], "torch": ["2.13.0"], "version": ["0.1.0"], "commit": []},
        "variants": rows,
        "warnings": ["Say a=b."],
    }


def noisy(names: Sequence[str], seeds: int, spread: float = 0.01) -> Runs:
    draw = random.Random(0)
    return {name: {seed: 4 + 0.01 * i + draw.gauss(0, spread) for seed in range(seeds)} for i, name in enumerate(names)}


def falling(runs: Runs) -> Curves:
    """A line for each run that ends at its result."""
    draw = random.Random(1)
    ends = {name: {seed: 4.0 if math.isinf(value) else value for seed, value in values.items()} for name, values in runs.items()}
    line = {
        name: {seed: [(float(at), end + 30 / at + draw.gauss(0, 0.002)) for at in range(10, 101, 10)] for seed, end in values.items()}
        for name, values in ends.items()
    }
    return {"val_bits_per_byte": line, "loss": line}


def charts(html: str) -> list[ElementTree.Element]:
    """Every chart, parsed as XML."""
    return [ElementTree.fromstring(found) for found in re.findall(r'<svg class="chart.*?</svg>(?=\s*(?:</div>|<p))', html, re.DOTALL)]


def labelled(html: str, label: str) -> ElementTree.Element:
    return next(chart for chart in charts(html) if chart.get("aria-label", "").startswith(f"{label}: "))


def percent(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name].removesuffix("%"))


def inverse(html: str) -> tuple[float, float]:
    """(value at 0 %, value of 1 %) of the forest plot, read off the numbers below it."""
    axis = next(chart for chart in charts(html) if "aria-hidden" in chart.attrib)
    ticks = [(percent(text, "x"), float(str(text.text).replace("−", "-"))) for text in axis.iter("text")]
    (left, low), (right, high) = ticks[0], ticks[-1]
    each = (high - low) / (right - left)
    return low - left * each, each


def test_every_seed_has_its_dot_at_its_difference() -> None:
    runs = noisy(["plain", "a", "b"], 6)
    del runs["b"][4]
    html = page(tree(runs), {})
    zero, each = inverse(html)
    strips = {chart.attrib["aria-label"].partition(",")[0]: chart for chart in charts(html) if "strip" in chart.attrib["class"]}
    assert list(strips) == ["a", "b"]
    for name, strip in strips.items():
        dots = {str(dot[0].text).partition(":")[0]: zero + each * percent(dot, "cx") for dot in strip.iter("circle")}
        pairs = {f"seed {seed}": value - runs["plain"][seed] for seed, value in runs[name].items()}
        assert dots == pytest.approx(pairs, abs=1e-5 * 100 * each)
        lines = [line for line in strip.findall("line") if "hue" in line.attrib["class"]]
        interval = [zero + each * percent(line, key) for line in lines for key in ("x1", "x2")]
        found = tree(runs)["variants"][name]["difference"]
        assert interval == pytest.approx(found["interval"], abs=1e-5 * 100 * each)
        diamond = strip.findall("svg")[-1]
        assert zero + each * percent(diamond, "x") == pytest.approx(found["mean"], abs=1e-5 * 100 * each)


def test_runs_that_diverged_stand_at_the_edges_with_their_number() -> None:
    runs = noisy(["plain", "a"], 6)
    runs["a"] |= {0: math.inf, 1: math.inf, 3: math.inf}
    runs["plain"] |= {2: math.inf, 3: math.inf}
    html = page(tree(runs), falling(runs))
    strip = next(chart for chart in charts(html) if "strip" in chart.attrib["class"])
    assert len(list(strip.iter("circle"))) == 2
    crosses = {box.attrib["x"]: str(box[0].text) for box in strip.iter("svg") if "x" in box.attrib and box[0].tag == "title"}
    zero, each = inverse(html)
    middle = next(place for place in crosses if place not in ("0%", "100%"))
    assert crosses == {"0%": "1 diverged: plain", "100%": "2 diverged: a", middle: "1 diverged: both"}
    assert zero + each * float(middle[:-1]) == pytest.approx(0, abs=1e-4)
    loss = labelled(html, "Validation against training tokens")
    assert sum("diverged" in str(title.text) for title in loss.iter("title")) == 5
    assert "3 of 6 runs of a and 2 of plain diverged; a sign test over 6 pairs" in Page(html).text


def test_an_interval_far_wider_than_its_seeds_is_cut_and_goes_on_with_an_arrow() -> None:
    html = page(tree(noisy(["plain", *"abcdef"], 2), least_effect=0.0), {})
    strips = [chart for chart in charts(html) if "strip" in chart.attrib["class"]]
    places = [percent(dot, "cx") for strip in strips for dot in strip.iter("circle")]
    assert max(places) - min(places) > 20
    assert html.count('d="M-5 0L4-5V5z"') == 2 * sum(bool(strip.findall("line[@x2='100%']")) for strip in strips) > 0


def test_curves_are_means_in_bands_from_the_lowest_seed_to_the_highest() -> None:
    runs = noisy(["plain", "a"], 3, spread=0.5)
    drawn = falling(runs)
    html = page(tree(runs), drawn)
    chart = labelled(html, "Validation against training tokens")
    texts = [text for text in chart.findall("text") if text.attrib.get("text-anchor") == "end"]
    low, high = ((float(text.attrib["y"]) - 4, float(str(text.text))) for text in (texts[0], texts[-1]))
    slope = (high[1] - low[1]) / (high[0] - low[0])
    for name, box in zip(runs, (box for box in chart.findall("svg") if "viewBox" in box.attrib), strict=True):
        polygon, line = ([tuple(map(float, at.split(","))) for at in one.attrib["points"].split()] for one in box)
        expected = [[points[i][1] for points in drawn["val_bits_per_byte"][name].values()] for i in range(10)]
        values = [low[1] + slope * (y - low[0]) for _, y in line]
        assert values == pytest.approx([sum(each) / 3 for each in expected], abs=0.002)
        edges = [low[1] + slope * (y - low[0]) for _, y in polygon]
        assert edges == pytest.approx([max(each) for each in expected] + [min(each) for each in expected[::-1]], abs=0.002)
    flops = labelled(html, "Validation against training FLOPs")
    points = [[one.attrib["points"] for box in found.findall("svg") for one in box if one.tag == "polyline"] for found in (chart, flops)]
    assert points[0] == points[1], "where a token costs the same, both charts have one shape"


def test_the_tuned_value_is_marked_among_those_that_were_tried() -> None:
    tried = {"0.0005": 4.2, "0.001": 4.1, "0.002": 4.05, "0.004": 4.06, "0.008": None}
    chart = labelled(page(tree(noisy(["plain", "a"], 2), tried=tried), {}), "Tuning optim.lr")
    places = {str(box[0].text): percent(box, "x") / 100 for box in chart.iter("svg") if "x" in box.attrib}
    assert sum(name.startswith("a: ") for name in places) == 6
    at = {value: places[f"a: {metric:g} at {float(value):.3g}"] for value, metric in tried.items() if metric}
    at["0.008"], chosen = places["a: diverged at 0.008"], places["a: 0.00225 was chosen"]
    steps = [math.log2(float(value) / 0.0005) for value in at]
    each = (at["0.008"] - at["0.0005"]) / 4
    assert [place - at["0.0005"] for place in at.values()] == pytest.approx([each * step for step in steps], abs=1e-4)
    assert chosen - at["0.0005"] == pytest.approx(each * math.log2(0.00225 / 0.0005), abs=1e-4)


def test_a_variant_reaches_across_to_the_tokens_at_which_the_baseline_is_as_good() -> None:
    runs = noisy(["plain", "a"], 3)
    lengths = {2.0**k: {str(seed): value - 0.1 * k for seed, value in runs["plain"].items()} for k in (-1, 0, 1)}
    found = tree(runs, exchange={f"{k:g}": {"tokens": round(1000 * k), "runs": values} for k, values in lengths.items()})
    found["variants"]["a"]["mean"] = 4.01
    html = page(found, {})
    chart = labelled(html, "Differences in tokens")
    points = [one.attrib["points"].split() for box in chart.findall("svg") for one in box if one.tag == "polyline"]
    (left, middle, right), (own, there) = ([float(point.partition(",")[0]) for point in line] for line in points)
    assert own == pytest.approx(middle, abs=0.01) == pytest.approx((left + right) / 2, abs=0.01)
    assert there == pytest.approx(own + (left - own) * math.log2(1 / 0.8), abs=0.01)
    assert "in tokens -20 % [under -50 %, +10 %]" in Page(html).text


def test_who_does_not_see_a_chart_is_told_its_ends_what_was_chosen_and_what_diverged() -> None:
    runs = noisy(["plain", "a"], 3, spread=0)
    html = page(tree(runs, tried={"0.001": 4.1, "0.002": 4.05, "0.008": None}), falling({name: {0: 4.0} for name in runs}))
    told = labelled(html, "Validation against training tokens").attrib["aria-label"]
    assert re.search(r": plain from [67][.]\d+ at 10 to 4[.]\d+ at 100; a from [67][.]\d+ at 10 to 4[.]\d+ at 100$", told), told
    told = labelled(html, "Tuning optim.lr").attrib["aria-label"]
    assert "a from 4.1 at 0.001 to 4.05 at 0.002; a: 0.00225 was chosen; a: 1 diverged" in told


def test_a_page_is_read_by_its_headings_and_the_heads_of_its_tables() -> None:
    runs = noisy(["plain", "a"], 3)
    html = page(tree(runs), falling(runs))
    read = Page(html)
    levels = [int(tag[1]) for tag in read.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1 and set(levels[1:]) == {2} and read.tags.count("main") == 1
    assert read.tags.count("th") == sum(name == "scope" for name, _ in read.attributes) > 0
    assert all(role in html for role in ('lang="en"', '<th scope="row" data-of="variant">plain</th>', '<th scope="row">every run</th>'))


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_legible_on_every_ground_and_so_are_lines(dark: bool) -> None:
    """WCAG 2.2: 4.5 to 1 of text (1.4.3), 3 to 1 of what a chart draws (1.4.11)."""
    style = page(tree(noisy(["plain", "a"], 2)), {}).partition("</style>")[0]
    schemes = re.findall(r"(@media \(prefers-color-scheme: dark\) \{\s*)?:root \{([^}]*)\}", style)
    assert len(schemes) == 4, "of each of two templates a light and a dark one"
    found = {name: colour for only, said in schemes if dark or not only for name, colour in re.findall(r"--(\w+): (#\w+)", said)}
    for ground in ("page", "panel"):
        assert all(contrast(found[name], found[ground]) >= 4.5 for name in ("text", "soft"))
        drawn = [name for name in found if name.startswith("hue") or name in ("first", "second")]
        assert len(drawn) == 7
        assert {name: round(contrast(found[name], found[ground]), 2) for name in drawn if contrast(found[name], found[ground]) < 3} == {}


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' relative luminances, WCAG 2.2."""
    lights = []
    for colour in (one, other):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


LONG = [f"variant-{i:02d}-{'x' * 49}" for i in range(12)]
DIVERGED: Runs = {name: dict.fromkeys(range(3), math.inf) for name in "ab"}
EXTREMES: dict[str, tuple[Runs, int | None]] = {
    "twelve long names": (noisy(LONG, 5), None),
    "100 seeds": (noisy(["a", "b"], 100), None),
    "two variants, two seeds": (noisy(["a", "b"], 2), None),
    "equal runs": ({name: {0: 4.0, 1: 4.0} for name in "ab"}, None),
    "everything diverged": (DIVERGED, None),
    "nothing has run": ({"a": {}, "b": {}}, 5),
    "the baseline has run": ({"a": {0: 4.0, 1: 4.1}, "b": {}}, 5),
    "one pair": ({"a": {0: 4.0, 1: 4.1}, "b": {1: 4.2}}, 5),
    "tiny and huge": ({"a": {0: 1e-12, 1: 2e-12}, "b": {0: 1e30, 1: 2e30}}, None),
}


@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("least_effect", [0.0, 0.02])
def test_any_study_is_one_well_formed_file_of_its_own(case: str, least_effect: float) -> None:
    runs, seeds = EXTREMES[case]
    found, drawn = tree(runs, least_effect, seeds=seeds), falling(runs)
    html = page(found, drawn)
    read = Page(html)
    assert html == page(found, drawn)
    assert all(name in read.text for name in runs) and "Say a=b." in read.text
    assert not {"script", "link", "img", "iframe", "image", "use"} & set(read.tags)
    assert not re.search(r"https?://|@import|url\(|nan|inf\b", html.partition("</style>")[2])
    for chart in charts(html):
        for box in chart.iter():
            places = [percent(box, key) for key in ("x", "x1", "x2", "cx") if box.attrib.get(key, "").endswith("%")]
            assert all(0 <= place <= 100 for place in places)


def test_what_names_say_is_text() -> None:
    runs = noisy(["<b>&\"'</b>", "a<script>"], 2)
    found = tree(runs, tried={"0.1": 4.0, "0.2": 4.1}) | {"study": "<i>", "warnings": ["<u>"], "metric": "<s>"}
    found["units"]["<s>"] = "<i>"
    read = Page(page(found, falling(runs)))
    assert not {"b", "script", "i", "u", "s"} - {"b"} & set(read.tags)
    assert read.tags.count("b") == 1, "the verdict"
    assert all(text in read.text for text in ("<b>&\"'</b>", "a<script>", "<i>", "<u>", "<s>"))


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-0.031, 0.0148), (4.81, 4.83), (0, 30_720), (1e-9, 3e-9), (0, 9e9), (-5, -5), (1500, 1510)]
)
def test_ticks_are_round_few_and_where_they_say(low: float, high: float) -> None:
    found = scale([low, high])
    values = [value for value, _ in found.ticks()]
    assert 2 <= len(values) <= 7 and len({text for _, text in found.ticks()}) == len(values)
    assert all(0 <= found(value) <= 1 for value in values)
    for value, text in found.ticks():
        assert len(text) <= 9
        if " " not in text:
            assert float(text.replace("−", "-").replace(",", "")) == pytest.approx(value, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize(("low", "high"), [(0.00025, 0.004), (0.001, 0.002), (1e-5, 1.0), (0.01, 0.01), (64, 4096)])
def test_ticks_of_logarithms_too(low: float, high: float) -> None:
    found = scale([low, high], log=True)
    assert 2 <= len(found.ticks()) <= 7 and all(0 <= found(value) <= 1 for value, _ in found.ticks())


def test_a_variant_without_runs_is_not_judged() -> None:
    row = {"tuned": None, "tuning": None, "text": None, "mean": None, "runs": [], "failed": None}
    undecided = {"verdict": "cannot tell", "more_seeds": 0, "given_up": False, "pairs": []}
    variants = {"a": {**row, "difference": None, "mean": 1.0, "runs": [0, 1]}, "b": {**row, "difference": undecided}}
    variants["c"] = variants["b"] | {"failed": "it broke"}
    _, *rows = cells({"metric": "m", "seeds": 2, "exchange": None, "variants": variants})
    assert [each[4] for each in rows] == ["baseline", "not run yet", "failed"]
