"""What a run or a comparison looks like on paper: report.html, and the table and picture of `lm compare`."""

import re
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path

from lm.printing import one_line
from lm.report.collect import Comparison, Row, collect
from lm.report.run import Run, read_run
from lm.report.units import ABSENT, duration, fixed, shown, si, table
from lm.schema import Tree, flatten
from lm.storage.out import out_folder, require_free
from lm.storage.reading import yaml_text
from lm.storage.run_folder import RunFolder

TEMPLATE = Path(__file__).with_name("page.html.j2")
MOST_COLUMNS = 4


def write_report(run_folder: Path) -> Path:
    """One self-contained page beside the run, of a finished or an unfinished run. Raises as `read_run` does, or ResourceError."""
    from jinja2 import Environment, StrictUndefined

    from lm.report.curves import curves

    run = read_run(run_folder)
    page = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True).from_string(TEMPLATE.read_text("utf-8"))
    html = page.render(
        run=run,
        result=_result(run),
        numbers=_numbers(run),
        sources=_sources(run),
        curves=curves(run),
        samples=_samples(run.samples),
        events=[_event(line) for line in run.events],
        config=yaml_text(run.config),
        reproduce=_reproduce(run),
    )
    return RunFolder(run_folder).write_report(html)


def compare(runs: Sequence[str | Path], out: str | Path | None = None, overwrite: bool = False) -> str:
    """Returns a table of runs, best first, with what differs between their configs and what makes the comparison unfair.

    out: a folder for the same as compare.md and the curves as compare.png, which does not exist, or with `overwrite` is of an earlier
    comparison. Raises ConfigError where a folder is no run, CheckpointError where a file is damaged, ResourceError where `out` cannot be
    written.
    """
    comparison = collect([Path(run) for run in runs])
    blocks, notes = _tables(comparison), comparison.notes
    if comparison.repeated:
        notes = ["± is the standard error over seeds; * differs from the best over the shared seeds (paired t-test, 95 %).", *notes]
    if out is not None:
        with out_folder(require_free(out, overwrite), overwrite) as folder:
            _write_comparison(folder, comparison, blocks, notes)
    return "\n\n".join([*map(_aligned, blocks), "\n".join(map(one_line, notes))]).rstrip()


def _write_comparison(folder: Path, comparison: Comparison, blocks: list[list[list[str]]], notes: list[str]) -> None:
    from lm.report.curves import comparison_png

    comparison_png(comparison, folder / "compare.png")
    pieces = [*map(_markdown, blocks), "![curves](compare.png)", "\n".join(f"- {_literal(note)}" for note in notes)]
    (folder / "compare.md").write_text("\n\n".join(piece for piece in pieces if piece) + "\n", encoding="utf-8", errors="backslashreplace")


def _tables(comparison: Comparison) -> list[list[list[str]]]:
    """One table with a column per differing key; where that gets too wide, a second one with a row per key."""
    rows = comparison.rows
    cells = [_cells(row, comparison) for row in rows]
    made = [list(cells[0]), *(list(row.values()) for row in cells)]
    if len(comparison.keys) <= max(MOST_COLUMNS, len(rows)):
        extras = [comparison.keys, *(comparison.changes(row) for row in rows)]
        return [[[*row, *extra] for row, extra in zip(made, extras, strict=True)]]
    by_run = zip(comparison.keys, *(comparison.changes(row) for row in rows), strict=True)
    return [made, [["config", *(row.name for row in rows)], *map(list, by_run)]]


def _cells(row: Row, comparison: Comparison) -> dict[str, str]:
    """By column; seeds where some row has several."""
    found = {
        "run": row.name,
        "parameters": si(row.mean("parameters")),
        "FLOPs/token": si(row.mean("flops_per_token")),
        "tokens": si(row.mean("tokens")),
        comparison.title: fixed(row.mean(comparison.metric), row.error(comparison.metric)),
        "behind": comparison.behind(row),
        "tokens/s": si(row.mean("tokens_per_second")),
        "wall time": duration(row.mean("train_s")),
    }
    return found | ({"seeds": " ".join(map(str, row.seeds))} if comparison.repeated else {})


def _aligned(rows: list[list[str]]) -> str:
    dashes = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return table([rows[0], dashes, *rows[1:]], indent="")


def _markdown(table: list[list[str]]) -> str:
    table = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join("| " + " | ".join(map(_literal, cells)) + " |" for cells in table)


def _literal(text: str) -> str:
    """Neither HTML nor Markdown nor a line of its own, whatever a run is called."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", escape(one_line(text), quote=False))


def _result(run: Run) -> str:
    steps, most = run.number("steps") or run.number("step") or 0, flatten(run.config).get("trainer.max_steps", ABSENT)
    start = f"After {steps:,.0f} steps and" if run.finished else f"Unfinished: after {steps:,.0f} of {shown(most)} steps and"
    start += f" {si(run.number('tokens'))} tokens"
    bits, loss, zlib = (run.number(key) for key in ("val_bits_per_byte", "val_loss", "zlib_bits_per_byte"))
    if bits is None:
        known = f"the validation loss is {loss:.3f} nats per token" if loss is not None else "nothing is validated yet"
        return f"{start}, {known}."
    beside = f"; zlib at level 9 needs {zlib:.3f}" if zlib is not None else ""
    return f"{start}, the validation text takes {bits:.3f} bits per byte{beside}."


def _numbers(run: Run) -> list[tuple[str, str, str]]:
    number, summary = run.number, run.summary
    zlib, inner, per_token = number("zlib_bits_per_byte"), number("parameters_non_embedding"), number("cache_bytes_per_token")
    mfu = number("mfu_pct")
    cards = [
        ("val bits per byte", fixed(number("val_bits_per_byte")), f"zlib level 9: {zlib:.4f}" if zlib is not None else ""),
        ("val loss", fixed(number("val_loss")), "nats per token"),
        ("parameters", si(number("parameters")), f"{si(inner)} without embeddings" if inner is not None else ""),
        ("FLOPs per token", si(number("flops_per_token")), f"{si(per_token)}B cache per token" if per_token is not None else ""),
        ("tokens", si(number("tokens")), f"seed {run.config.get('seed', 0)}"),
        ("tokens per second", si(number("tokens_per_second")), f"{mfu:.0f} % of peak FLOPs" if mfu is not None else ""),
        ("wall time", duration(number("train_s")), ""),
        ("device", str(summary.get("device") or "-"), ""),
        ("torch", str(summary.get("torch") or "-"), f"Python {summary['python']}" if summary.get("python") else ""),
    ]
    parent = summary.get("parent") or run.config.get("init_from")
    if parent:
        cards.append(("fine-tuned from", str(parent), ""))
    return [card for card in cards if card[1] != "-"]


def _sources(run: Run) -> list[tuple[str, ...]]:
    """Of each source of a mixture: name, tokens read, their share, epochs, validation loss."""
    names = [source["name"] for source in run.config.get("data", {}).get("sources", [])]
    tokens, epochs, losses = ([run.number(f"{key}/{name}") for name in names] for key in ("tokens", "epochs", "val_loss"))
    total = sum(filter(None, tokens)) or 1
    return [
        (name, si(read or 0), f"{(read or 0) / total:.1%}", f"{turns or 0:.2f}", fixed(loss))
        for name, read, turns, loss in zip(names, tokens, epochs, losses, strict=True)
    ]


def _samples(text: str) -> list[tuple[str, str]]:
    """(heading, text) per `## ` heading of samples.md, newest first; one untitled piece where there is no heading."""
    before, *parts = re.split(r"^## +(step\b.*)$", text, flags=re.MULTILINE | re.IGNORECASE)
    if not parts:
        return [("", before.strip())] if before.strip() else []
    return [(title.strip(), body.strip("\n")) for title, body in zip(parts[::2], parts[1::2], strict=True)][::-1]


def _event(line: Tree) -> tuple[str, str, str]:
    details = {key: value for key, value in flatten(line).items() if key not in ("step", "event")}
    return shown(line["step"]), str(line["event"]), ", ".join(f"{key} {value}" for key, value in details.items())


def _reproduce(run: Run) -> dict[str, str]:
    command = run.summary.get("command")
    if isinstance(command, str):
        return {"text": "Written by this command; in an empty runs folder it repeats the run.", "command": command}
    config = shlex.quote(str(run.folder / "config.yaml"))
    text = "Every value is in config.yaml, defaults included. To repeat the run, copy the file, change run.name and train from it."
    return {"text": text, "command": f"cp {config} again.yaml\npython -m lm.training.worker again.yaml"}
