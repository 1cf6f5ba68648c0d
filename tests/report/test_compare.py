"""`lm compare` of whatever a sweep leaves, as tables for terminals, papers and programs, and as a picture."""

import csv
import json
import re
import shutil
import statistics
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

from lm import config
from lm.errors import ConfigError
from lm.report.collect import collect
from lm.report.compare import compare
from lm.report.curves import _compare, _mean, comparison_png
from lm.report.run import read_run
from lm.storage.reading import yaml_text
from lm.storage.run_folder import RunFolder
from tests.conftest import Lm, unprivileged

WriteRun = Callable[..., Path]


@pytest.fixture
def sweep(tmp_path: Path, write_run: WriteRun) -> Path:
    """Five runs, one of them deeper and one unfinished, and six folders that no one can read."""
    folder = tmp_path / "runs"
    for seed, bits in enumerate((1.5, 1.6, 1.7)):
        write_run(folder / f"a{seed}", seed=seed, final=bits, val_bits_per_byte=bits)
    write_run(folder / "pos" / "b", ffn="relu", val_bits_per_byte=1.2)
    write_run(folder / "half", ffn="gelu", finished=False)
    (write_run(folder / "failed") / "metrics.jsonl").unlink()
    (write_run(folder / "torn") / "summary.json").write_text("{")
    (write_run(folder / "strange") / "config.yaml").write_text("[1")
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("x")
    return folder


@pytest.mark.slow
def test_a_folder_of_runs_is_compared_and_what_cannot_be_read_is_left_out_by_name(sweep: Path, lm: Lm) -> None:
    names = ["b ", "a0 +2 ", "half (unfinished) "]
    for given in ([str(sweep)], [f"{sweep}/*"], [*map(str, sorted(sweep.iterdir())), f"{sweep}/gone"]):
        code, out, err = lm("compare", *given, "out=c", "overwrite=true")
        assert code == 0, err
        assert all(f"\n{name}" in out for name in names)
        assert all(re.search(rf"\nLeft out: .*/{name}\b", out) for name in ("failed", "torn", "strange"))
        assert ("notes.txt" in out) == ("/empty: " in out) == (given != [str(sweep)])
    code, _, err = lm("compare", str(sweep / "failed"), str(sweep / "torn"))
    assert code == 2 and "failed: metrics.jsonl is missing" in err.splitlines()[-1]
    code, _, err = lm("compare", str(sweep / "torn"))
    assert code == 3 and "summary.json" in err.splitlines()[-1]


def test_without_a_place_for_the_picture_the_table_is_told(
    lm: Lm, write_run: WriteRun, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(public / "a")
    monkeypatch.chdir(public)
    with unprivileged():
        code, out, err = lm("compare", "a")
        assert code == 0 and "1.6" in out and "no picture: " in err and "Or say out=FOLDER." in err
        assert lm("compare", "a", "out=here")[0] == 5


def test_seeds_of_before_and_after_an_option_came_about_share_a_row(tmp_path: Path, write_run: WriteRun, lm: Lm) -> None:
    """Seen to fail: two rows, with no standard error, and a line for each option that lm had been given in between, 23 of them once."""
    today = config("nano").tree()
    without = {key: value for key, value in today["model"]["embed"].items() if key != "smear"}
    before, another = ({"model": today["model"] | {"embed": embed}} for embed in (without, without | {"norm": True}))
    for name, seed, change in (("a", 0, before), ("b", 1, {}), ("c", 0, another)):
        (write_run(tmp_path / name) / "config.yaml").write_text(yaml_text(today | change | {"seed": seed}))
    code, out, err = lm("compare", *(str(tmp_path / name) for name in "abc"), "out=x", "format=json")
    assert code == 0 and "smear" not in out, err
    assert [(row["run"], row["model.embed.norm"]) for row in json.loads(out)["rows"]] == [("a +1", False), ("c", True)]


@pytest.mark.parametrize(("section", "changes"), [("trainer", {"profile": 3}), ("trainer", {"log_every": 7}), ("data", {"workers": 3})])
def test_seeds_of_which_one_told_more_share_a_row(
    tmp_path: Path, write_run: WriteRun, lm: Lm, section: str, changes: dict[str, int]
) -> None:
    """Seen to fail: two rows, told apart by an option of how a run goes."""
    today = config("nano").tree()
    for name, seed, change in (("a", 0, changes), ("b", 1, {})):
        tree = today | {"seed": seed, section: today[section] | change}
        (write_run(tmp_path / name) / "config.yaml").write_text(yaml_text(tree))
    code, out, err = lm("compare", *(str(tmp_path / name) for name in "ab"), "out=x", "format=json")
    assert code == 0, err
    assert [row["run"] for row in json.loads(out)["rows"]] == ["a +1"]


@pytest.mark.slow
def test_how_often_runs_are_right_is_compared_where_all_tell_it(tmp_path: Path, write_run: WriteRun, lm: Lm) -> None:
    told = ({"val_accuracy": 0.75, "val_macro_f1": 0.625}, {"val_accuracy": 0.5, "val_macro_f1": 0.375})
    runs = [str(write_run(tmp_path / name, ffn=name, **each)) for name, each in zip(("relu", "gelu"), told, strict=True)]
    assert re.search(r"val accuracy +val macro F1.*\n.*\n.*0\.7500 +0\.6250", lm("compare", *runs)[1])
    assert re.search(r"val accuracy.*\n.*\n.*0\.7500", lm("compare", *runs)[1]) and "val_accuracy" in lm("compare", *runs, "format=csv")[1]
    assert "accuracy" not in lm("compare", *runs, str(write_run(tmp_path / "plain")))[1]


def test_rewarded_runs_are_compared_by_their_reward_the_most_first(tmp_path: Path, write_run: WriteRun, lm: Lm) -> None:
    """Whatever their bits per byte."""
    runs = []
    for name, reward in (("low", 0.25), ("high", 0.75)):
        runs.append(write_run(tmp_path / name, ffn=name, val_reward=reward, val_bits_per_byte=1 + reward))
        config = yaml.safe_load((runs[-1] / "config.yaml").read_text())
        (runs[-1] / "config.yaml").write_text(yaml_text(config | {"objective": {"kind": "grpo", "rewards": {name: {}}}}))
    code, out, err = lm("compare", *map(str, runs), "overwrite=true")
    assert code == 0, err
    assert re.search(r"val reward +difference.*\n.*\nhigh .* 0\.7500 +\+0\.5000 .*\nlow .* 0\.2500 +baseline", out)
    assert "Not comparable: what is rewarded differs (objective.rewards" in out
    assert "val bits/byte" in lm("compare", *map(str, runs), str(write_run(tmp_path / "plain")), "overwrite=true")[1]
    out = lm("runs", *map(str, runs))[1]
    assert "0.2500 reward" in out and "0.7500 reward" in out


def test_the_picture_has_the_line_of_zlib_also_where_a_run_has_not_ended(sweep: Path) -> None:
    """Seen to fail: the text of such a run, which is not known yet, was taken for another one."""
    figure = Figure()
    _compare(figure, collect([sweep]))
    assert "zlib level 9: 1.9031" in [line.get_label() for line in figure.axes[0].lines]


def test_a_run_in_the_folder_of_a_sweep_stands_beside_those_of_the_sweep(sweep: Path, lm: Lm) -> None:
    for name in ("config.yaml", "metrics.jsonl", "summary.json"):
        shutil.copy(sweep / "pos" / "b" / name, sweep / name)
    code, out, err = lm("compare", str(sweep))
    assert code == 0, err
    assert all(f"\n{name}" in out for name in (f"{sweep.name} ", "b ", "a0 +2 "))


def test_a_run_damaged_within_a_sweep_is_the_error_where_it_is_alone(sweep: Path, lm: Lm) -> None:
    shutil.rmtree(sweep / "pos")
    code, _, err = lm("compare", str(sweep / "pos"), str(sweep / "empty"))
    assert code == 2 and "pos: there is no such run folder" in err.splitlines()[-1]


@pytest.mark.parametrize("ending", ["csv", "tex"])
def test_a_table_is_written_in_the_format_that_its_ending_says(sweep: Path, tmp_path: Path, lm: Lm, ending: str) -> None:
    assert lm("compare", str(sweep), f"out=table.{ending}")[0] == 0
    found = (tmp_path / f"table.{ending}").read_text()
    code, out, err = lm("compare", str(sweep), f"format={ending}", "out=c", "overwrite=true")
    assert code == 0 and out == found and "picture: c/compare.png" in err
    assert lm("compare", str(sweep), f"out=table.{ending}")[0] == 2
    assert lm("compare", str(sweep), f"out=table.{ending}", "overwrite=true")[0] == 0


def test_the_ending_of_out_says_the_format_and_an_unknown_one_is_refused(sweep: Path, tmp_path: Path) -> None:
    assert compare([sweep], tmp_path / "t.TXT").strip() == (tmp_path / "t.TXT").read_text(encoding="utf-8").strip()
    with pytest.raises(ConfigError, match=r"t\.xlsx: no table is written as \.xlsx\. End it in \.txt"):
        compare([sweep], tmp_path / "t.xlsx")
    assert not (tmp_path / "t.xlsx").exists()
    compare([sweep], f"{tmp_path}/compare.old/")
    assert (tmp_path / "compare.old" / "compare.png").is_file()


def test_csv_and_json_hold_the_numbers_in_full(sweep: Path) -> None:
    rows = list(csv.DictReader(compare([sweep], format="csv").splitlines()))
    tree = json.loads(compare([sweep], format="json"))
    assert [row["run"] for row in rows] == [row["run"] for row in tree["rows"]] == ["b", "a0 +2", "half (unfinished)"]
    assert float(rows[1]["val_bits_per_byte"]) == tree["rows"][1]["val_bits_per_byte"] == pytest.approx(1.6)
    assert tree["rows"][1]["standard_error"] == pytest.approx(0.1 / 3**0.5) and tree["rows"][1]["model.ffn.activation"] == "swiglu"
    assert rows[1]["parameters"] == "3285504" or float(rows[1]["parameters"]) == 3285504
    assert tree["metric"] == "val_bits_per_byte" and any("Left out" in note for note in tree["notes"])


def test_differences_are_numbers_in_csv_and_json(tmp_path: Path, write_run: WriteRun) -> None:
    """Seen to fail: they were text, '+0.0200 [-0.0700, +0.1100]', of four digits."""
    finals = {"gelu": [1.5, 1.6, 1.7], "relu": [1.62, 1.55, 1.69], "swiglu": [2.5]}
    for activation, values in finals.items():
        for seed, value in enumerate(values):
            write_run(tmp_path / "all" / f"{activation}{seed}", seed=seed, ffn=activation, val_bits_per_byte=value)
    rows = {row["model.ffn.activation"]: row for row in csv.DictReader(compare([tmp_path / "all"], format="csv").splitlines())}
    assert [rows["gelu"][key] for key in ("difference", "difference_low", "difference_high", "p_holm")] == [""] * 4
    assert float(rows["swiglu"]["difference"]) == pytest.approx(0.9) and rows["swiglu"]["difference_low"] == ""
    away, low, high = (float(rows["relu"][key]) for key in ("difference", "difference_low", "difference_high"))
    assert away == pytest.approx(0.02) and low < 0 < high and low + high == pytest.approx(2 * away) and float(rows["relu"]["p_holm"]) > 0.05


HOSTILE = r"<img src=x onerror=alert(1)>&_x_*b*`c`[l](u)|\%$#{}~^" + "\n\x1b[31m"


def test_names_and_values_are_no_markup_in_any_format(tmp_path: Path, write_run: WriteRun) -> None:
    first = write_run(tmp_path / "_a_ & 50% <b>#1$")
    second = write_run(tmp_path / "=1+1")
    config = second / "config.yaml"
    config.write_text(config.read_text().replace("activation: swiglu", f"activation: {json.dumps(HOSTILE)}"))
    found = {form: compare([first, second], format=form) for form in ("text", "md", "tex", "csv", "json")}  # type: ignore[arg-type]
    assert not any("\x1b" in text for text in found.values())
    assert "<b>" not in found["md"] and "<img" not in found["md"] and r"\_a_ &amp; 50% &lt;b&gt;#1$" in found["md"]
    tables = [block.splitlines() for block in found["md"].split("\n\n") if block.startswith("|")]
    assert all(len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1 for lines in tables)
    assert r"\_a\_ \& 50\% \textless{}b\textgreater{}\#1\$" in found["tex"]
    tables = [re.findall(r".*\\\\$", block, re.MULTILINE) for block in found["tex"].split("\n\n")]
    assert all(len({len(re.findall(r"(?<!\\)&", line)) for line in lines}) <= 1 for lines in tables) and max(map(len, tables)) > 2
    assert [row["run"] for row in csv.DictReader(found["csv"].splitlines())] in (["'=1+1", first.name], [first.name, "'=1+1"])
    assert {row["run"] for row in json.loads(found["json"])["rows"]} == {"=1+1", first.name}


def test_a_table_of_many_keys_goes_on_below(tmp_path: Path, write_run: WriteRun) -> None:
    """Each piece says whose it is.  Seen to fail with lines of 690 columns."""
    runs = [write_run(tmp_path / f"a-run-with-a-name-{i}") for i in range(16)]
    config = yaml.safe_load((runs[0] / "config.yaml").read_text())
    more = {f"a_number_of_ones_own_{i}": i for i in range(9)}
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config | {"trainer": config["trainer"] | more}))
    made, *pieces = [block.splitlines() for block in compare(runs).split("\n\n") if block.startswith("run ")]
    assert len(made) == 18 and len(pieces) > 1
    assert all(len(piece) == 18 and piece[2].startswith("a-run") and max(map(len, piece)) <= 120 for piece in pieces)
    told = [title for piece in pieces for title in piece[0].split()[1:]]
    assert sorted(told) == [f"trainer.{key}" for key in more]


def test_an_option_that_is_off_wherever_it_exists_is_no_difference(tmp_path: Path, write_run: WriteRun) -> None:
    """Seen to fail: 33 runs of a month made 692 lines, most of them of such."""
    plain, other, third = (yaml.safe_load((write_run(tmp_path / name) / "config.yaml").read_text()) for name in "abc")
    own = {"kind": "own", "width": 3, "bias": False, "names": [], "more": None, "rate": 0, "used": True}
    (tmp_path / "b" / "config.yaml").write_text(yaml.safe_dump(other | {"adapter": own}))
    (tmp_path / "c" / "config.yaml").write_text(yaml.safe_dump(third | {"adapter": own | {"bias": True}}))
    (tmp_path / "a" / "config.yaml").write_text(yaml.safe_dump(plain | {"adapter": None}))
    found = []
    for runs in ("ab", "abc"):
        row = next(iter(json.loads(compare([tmp_path / name for name in runs], format="json"))["rows"]))
        found.append({key.removeprefix("adapter.") for key in row if key.startswith("adapter")})
    assert found == [{"kind", "width", "rate", "used"}, {"kind", "width", "rate", "used", "bias"}]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here")
@pytest.mark.slow
def test_latex_accepts_the_table(sweep: Path, tmp_path: Path) -> None:
    page = f"\\documentclass{{article}}\\begin{{document}}\n{compare([sweep], format='tex')}\n\\end{{document}}\n"
    (tmp_path / "t.tex").write_text(page)
    subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


def test_seeds_make_a_band_of_their_standard_error(sweep: Path) -> None:
    row = next(row for row in collect([sweep]).rows if len(row.runs) == 3)
    x, y, error = _mean(row, "val_bits_per_byte", "tokens")
    curves = [run.series("val_bits_per_byte", "tokens") for run in row.runs]
    assert x == curves[0][0] and len(x) == 4
    at_end = [values[-1] for _, values in curves]
    assert y[-1] == pytest.approx(statistics.fmean(at_end)) and error[-1] == pytest.approx(statistics.stdev(at_end) / 3**0.5)


@pytest.mark.slow
def test_a_curve_stands_by_steps_tokens_flops_or_the_time_of_its_steps(sweep: Path, tmp_path: Path, lm: Lm) -> None:
    run = read_run(sweep / "a0")
    places = {x: run.series("val_loss", x)[0] for x in ("step", "tokens", "flops", "time")}  # type: ignore[arg-type]
    steps = [50, 100, 150, 200]
    assert places["step"] == steps and places["tokens"] == [2048 * step for step in steps]
    assert places["flops"] == [21200000 * 2048 * step for step in steps]
    assert places["time"] == pytest.approx([0.22 * step for step in steps])
    pictures = set()
    for x in places:
        code, out, _ = lm("compare", str(sweep), f"x={x}", "out=c", "overwrite=true")
        assert code == 0 and ("Not in the picture, since training FLOPs are not known of them yet: half." in out) == (x == "flops")
        pictures.add((tmp_path / "c" / "compare.png").read_bytes())
    assert len(pictures) == 4
    assert lm("compare", str(sweep), "x=epochs")[0] == 2


def test_runs_are_told_apart_without_colours_in_the_picture(sweep: Path, tmp_path: Path) -> None:
    figure = Figure()
    comparison = collect([sweep])
    _compare(figure, comparison)
    dashes = [line.get_linestyle() for line in figure.axes[0].lines[: len(comparison.rows)]]
    assert len(dashes) > 1 and all(one != other for one, other in pairwise(dashes))
    compare(sweep, tmp_path / "c")
    assert "![val bits/byte against tokens, a curve for each run](compare.png)" in (tmp_path / "c/compare.md").read_text()


def test_one_unfinished_run_alone_has_a_picture(sweep: Path, tmp_path: Path) -> None:
    comparison_png(collect([sweep / "half"], x="flops"), tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_one_run_is_compared_by_its_path_or_itself(sweep: Path) -> None:
    """Seen to walk through the whole file system, letter by letter of the path."""
    found = compare(str(sweep / "a0"))
    assert "a0" in found and found == compare(sweep / "a0") == compare(RunFolder(sweep / "a0")) == compare([RunFolder(sweep / "a0")])
