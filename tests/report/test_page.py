import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from lm.errors import ConfigError, ResourceError
from lm.report.compare import compare
from lm.report.curves import visible
from lm.report.page import write_report

WriteRun = Callable[..., Path]


class Page(HTMLParser):
    """Tags, attributes and text; `open` must be empty at the end of a well-formed page."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_report_shows_the_result_beside_zlib_and_every_curve(tmp_path: Path, write_run: WriteRun) -> None:
    page = page_of(write_run(tmp_path / "tiny", val_bits_per_byte=1.5012))
    assert "After 200 steps and 410 k tokens, the validation text takes 1.501 bits per byte; zlib at level 9 needs 1.903." in page.text
    for number in ("1.5012", "1.9031", "3.29 M", "21.2 M", "410 k", "9.01 k", "2 min 31 s", "cpu", "2.13.0"):
        assert number in page.text
    assert page.tags.count("svg") == 5
    assert page.text.count("zlib level 9") == 2  # a card's note and the dashed line


def test_the_head_says_which_model_data_and_code(tmp_path: Path, write_run: WriteRun) -> None:
    page = page_of(write_run(tmp_path / "tiny", data_fingerprint="beef" * 16, commit="0123456789ab+"))
    for text in ("decoder, ? layers of 64: mlp", "stdlib, 8 rows of 256 tokens a step, fingerprint beefbeefbeef", "bpe 4096",
                 "lm 0.1.0, commit 0123456789ab, with changes that are not committed"):  # fmt: skip
        assert text in page.text
    assert "commit" not in page_of(write_run(tmp_path / "half", finished=False)).text.split("Config")[0]


def test_report_needs_nothing_from_outside(tmp_path: Path, write_run: WriteRun) -> None:
    folder = write_run(tmp_path / "tiny")
    page = page_of(folder)
    assert not {"script", "link", "img", "iframe", "image"} & set(page.tags)
    targets = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert targets and all(target.startswith("#") for target in targets)
    assert not re.search(r"https?://|@import|url\((?!#)", (folder / "report.html").read_text())


def test_who_does_not_see_a_curve_is_told_where_it_begins_and_ends(tmp_path: Path, write_run: WriteRun) -> None:
    folder = write_run(tmp_path / "tiny")
    lines = [
        {"step": 1, "loss": 8.25, "tokens": 64},
        {"step": 10, "loss": 4.5, "tokens": 640},
        {"step": 10, "val_loss": 4.75, "tokens": 640},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    labels = [value for name, value in page_of(folder).attributes if name == "aria-label"]
    assert labels == ["Loss, nats/token, by step: this run from 8.25 at 1 to 4.5 at 10; validation 4.75 at 10"]


def test_report_escapes_what_the_run_wrote(tmp_path: Path, write_run: WriteRun) -> None:
    folder = write_run(tmp_path / "tiny")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "event": "<img src=x>", "why": "</table>&"}) + "\n")
    page = page_of(folder)
    assert "<script>alert(1)</script>" in page.text and "script" not in page.tags
    assert "return <b>x</b>" in page.text and "b" not in page.tags
    assert "<img src=x>" in page.text and "why </table>&" in page.text


@pytest.mark.slow
def test_newest_samples_come_first_and_open(tmp_path: Path, write_run: WriteRun) -> None:
    folder = write_run(tmp_path / "tiny")
    html = write_report(folder).read_text()
    assert html.index("<details open><summary>step 200</summary>") < html.index("<details><summary>step 100</summary>")
    (folder / "samples.md").write_text("no headings\n\nat all")
    assert "no headings\n\nat all" in page_of(folder).text


def test_of_very_many_samples_the_newest_are_shown(tmp_path: Path, write_run: WriteRun) -> None:
    """20,000 validations made a page of 14 MB."""
    folder = write_run(tmp_path / "tiny")
    (folder / "samples.md").write_text("".join(f"## step {step}\n\n```\ntext\n```\n\n" for step in range(1, 121)))
    html = write_report(folder).read_text()
    assert html.count("<summary>step ") == 100 and "step 120<" in html and "step 21<" in html and "step 20<" not in html
    assert "Older ones are in samples.md" in html


def test_report_is_the_same_for_the_same_run(tmp_path: Path, write_run: WriteRun) -> None:
    folder = write_run(tmp_path / "tiny")
    assert write_report(folder).read_bytes() == write_report(folder).read_bytes()
    assert [path.name for path in folder.iterdir() if "report" in path.name] == ["report.html"]


def test_report_of_an_unfinished_run_says_so(tmp_path: Path, write_run: WriteRun) -> None:
    page = page_of(write_run(tmp_path / "half", finished=False))
    assert "Unfinished: after 100 of 200 steps" in page.text
    assert "Samples" not in page.text and "None" not in page.text


@pytest.mark.parametrize(
    "line", [{"step": 1, "tokens": 64, "loss": 5.5, "lr": 0.0}, {"step": 1, "loss": None}, {"step": 0, "event": "start"}]
)
def test_one_line_of_metrics_is_enough(tmp_path: Path, write_run: WriteRun, line: dict[str, object]) -> None:
    folder = write_run(tmp_path / "young", finished=False)
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "nothing is validated yet" in page_of(folder).text


@pytest.mark.parametrize("length", [1, 8192, 20_001, 100_000])
def test_a_chart_of_a_long_curve_has_its_ends_and_extremes_and_few_points(length: int) -> None:
    """Seen to fail: matplotlib had a million points of each curve, and wrote a warning that its legend is slow."""
    y = [float((number * 7919) % 10_007) for number in range(length)]
    y[length // 3], y[length // 2] = 1e9, -1e9
    at = visible(y).tolist()
    assert at == sorted({*at}) and {0, length - 1, y.index(max(y)), y.index(min(y))} <= {*at}
    assert at == [*range(length)] if length <= 8192 else len(at) <= 3 * 4096 + 1


def test_reproduce_names_the_config_quoted_for_the_shell(tmp_path: Path, write_run: WriteRun) -> None:
    folder = write_run(tmp_path / "my runs" / "tiny")
    assert f"cp '{folder}/config.yaml'" in page_of(folder).text


def test_compare_table_has_the_figures_and_the_keys_that_differ(tmp_path: Path, write_run: WriteRun) -> None:
    folders = [write_run(tmp_path / "a", ffn="relu", val_bits_per_byte=1.75), write_run(tmp_path / "b", val_bits_per_byte=1.5)]
    table = compare(folders, tmp_path / "new" / "out").splitlines()
    assert re.split(r"  +", table[0])[-2:] == ["wall time", "model.ffn.activation"]
    assert re.split(r"  +", table[2]) == ["b", "3.29 M", "21.2 M", "410 k", "1.5000", "-0.2500", "9.01 k", "2 min 31 s", "swiglu"]
    assert re.split(r"  +", table[3]) == ["a", "3.29 M", "21.2 M", "410 k", "1.7500", "baseline", "9.01 k", "2 min 31 s", "relu"]
    with Image.open(tmp_path / "new" / "out" / "compare.png") as picture:
        assert picture.format == "PNG" and picture.convert("L").getextrema() == (0, 255)
    assert "| b | 3.29 M |" in (tmp_path / "new" / "out" / "compare.md").read_text()


def test_seeds_share_a_row_with_their_error(tmp_path: Path, write_run: WriteRun) -> None:
    folders = [write_run(tmp_path / f"s{seed}", seed=seed, val_bits_per_byte=1.5 + seed / 10) for seed in range(3)]
    table = compare(folders, tmp_path / "out")
    assert "s0 +2" in table and "1.6000 ± 0.0577" in table and "0 1 2" in table and "standard error" in table


def test_many_differing_keys_get_a_table_of_their_own(tmp_path: Path, write_run: WriteRun) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b")]
    config = folders[1] / "config.yaml"
    config.write_text(re.sub("lr:.*", "lr: 0.5\n  beta1: 0.5\n  beta2: 0.5\n  eps: 0.5\n  clip: null", config.read_text()))
    first, second = compare(folders, tmp_path / "out").split("\n\n")
    assert "optim" not in first
    assert [re.split(r"  +", line) for line in second.splitlines()][2:4] == [["optim.lr", "0.001", "0.5"], ["optim.beta1", "-", "0.5"]]


def test_table_cells_survive_markdown_and_mathtext(tmp_path: Path, write_run: WriteRun) -> None:
    compare([write_run(tmp_path / "a", ffn="x|y$z_{$"), write_run(tmp_path / "b")], tmp_path / "out")
    assert "x\\|y$z_{$" in (tmp_path / "out" / "compare.md").read_text()


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path, write_run: WriteRun) -> None:
    folder = write_run(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"out={tmp_path / 'file'}: it exists already"):
        compare([folder], tmp_path / "file")
    with pytest.raises(ResourceError, match=r"file/out: cannot be written \((Not a directory|File exists)\)"):
        compare([folder], tmp_path / "file" / "out")
    (folder / "report.html").mkdir()
    with pytest.raises(ResourceError, match=r"report\.html: cannot be written"):
        write_report(folder)
    assert not list(folder.glob(".*report*"))
