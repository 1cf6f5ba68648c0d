"""The report of a run, report.html, and the table and chart of `lm compare`."""

import os.path
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from lm.errors import ConfigError, expect
from lm.report.collect import collect
from lm.report.curves import comparison_png, curves, unplotted
from lm.report.frame import render
from lm.report.run import Axis, Run, read_run
from lm.report.tables import FORMATS, in_markdown, markdown
from lm.schema import Tree, did_you_mean, flatten
from lm.storage.atomic import replace_file
from lm.storage.out import out_folder, require_free
from lm.storage.reading import yaml_text
from lm.storage.run_folder import RunFolder
from lm.units import ABSENT, duration, fixed, shown, si

SEEDS = (
    "± is the standard error over seeds. Differences are over the seeds shared with the baseline, with an interval (paired t-test, 95 %,"
    " corrected by Holm for the number of rows); * excludes 0."
)
_ENDINGS = {"txt": "text"} | {name: name for name in FORMATS}
TEMPLATE = Path(__file__).with_name("page.html.j2")


def write_report(run_folder: Path) -> Path:
    """Writes report.html, one self-contained page, into the folder of a finished or unfinished run, and returns its path. Raises as
    `read_run` does, or ResourceError."""
    run = read_run(run_folder)
    html = render(
        TEMPLATE,
        run=run,
        result=_result(run),
        about=_about(run),
        numbers=_numbers(run),
        sources=_sources(run),
        curves=curves(run),
        samples=_samples(run.samples),
        events=[_event(line) for line in run.events],
        config=yaml_text(run.config),
        reproduce=_reproduce(run),
    )
    return RunFolder(run_folder).write_report(html)


def compare(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | Path | None = None,
    overwrite: bool = False,
    *,
    format: Literal["text", "md", "tex", "csv", "json"] = "text",
    x: Axis = "tokens",
    baseline: str | None = None,
) -> str:
    """Returns a table of runs, the lowest metric first, with the differences between their configs, and notes on an unfair comparison.

    runs: one or several folders of runs or sweeps, or globs; runs that cannot be read are left out and named in the notes. out: a folder
    for compare.md and the curves against `x` as compare.png, or a file for the table in the format of its ending; it must not exist, or
    with `overwrite` may be an earlier comparison's. baseline: the run that the others are compared with; None: the first one. Raises
    ConfigError where no run is left, CheckpointError where the only one is damaged, ResourceError where `out` cannot be written.
    """
    for name, given, options in (("format", format, [*FORMATS]), ("x", x, [*get_args(Axis)])):
        if given not in options:
            raise ConfigError(f"{name}={given!r} is not an option. {did_you_mean(str(given), options)}")
    expect("runs", runs, (str, os.PathLike, Iterable), "Give the folder of a run, or a list of several")
    listed = [runs] if isinstance(runs, str | os.PathLike) else [*runs]
    for run in listed:
        expect("runs", run, (str, os.PathLike), "Each is the folder of a run")
    expect("out", out, (str, os.PathLike, type(None)), "Give a folder or a file to write")
    expect("baseline", baseline, (str, os.PathLike, type(None)), "Give the folder or the name of a run")
    comparison = collect([Path(run) for run in listed], baseline)
    notes = [*comparison.notes, *unplotted(comparison, x)]
    if comparison.repeated:
        notes = [SEEDS, *notes]
    if out is not None and (told := table_format(out)) is not None:
        replace_file(_free_file(Path(os.path.expanduser(out)), overwrite), FORMATS[told](comparison, notes))
    elif out is not None:
        with out_folder(require_free(out, overwrite), overwrite) as folder:
            comparison_png(comparison, folder / "compare.png", x)
            pieces = (markdown(comparison, []), "![curves](compare.png)\n", "".join(f"- {in_markdown(note)}\n" for note in notes))
            (folder / "compare.md").write_text("\n".join(filter(None, pieces)), encoding="utf-8", errors="backslashreplace")
    return FORMATS[format](comparison, notes).rstrip("\n")


def table_format(out: str | Path) -> str | None:
    """Returns the table format that a path's ending names; None where the path is a folder. Raises ConfigError for an unknown ending."""
    if str(out).endswith("/") or Path(out).expanduser().is_dir():
        return None
    ending = Path(out).suffix[1:].lower()
    if ending.isalpha() and ending not in _ENDINGS:
        raise ConfigError(f"out={out}: no table is written as .{ending}. End it in .{', .'.join(_ENDINGS)}, or in / for a folder.")
    return _ENDINGS.get(ending)


def _free_file(path: Path, overwrite: bool) -> Path:
    if os.path.lexists(path) and not (overwrite and path.is_file() and not path.is_symlink()):
        remedy = "Choose another name" if overwrite or path.is_dir() else "Add overwrite=true to replace it, or choose another name"
        raise ConfigError(f"out={path}: it exists already. {remedy}.")
    return path


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


def _about(run: Run) -> list[tuple[str, str]]:
    """Returns (title, text) rows on what was trained, on which data, with which code."""
    flat, summary = flatten(run.config), run.summary
    deep = flat.get("model.n_layers", "?")
    layers = f"{deep} layer{'s' * (deep != 1)} of {flat.get('model.d_model', '?')}"
    slots = [str(flat[key]) for slot in ("norm", "position", "attention", "ffn") if (key := f"model.{slot}.kind") in flat]
    source = [shown(flat[key]) for key in ("data.kind", "data.name", "data.files") if flat.get(key) is not None]
    source += [", ".join(str(one.get("name")) for one in run.config.get("data", {}).get("sources", []))]
    rows = f"{flat.get('data.global_batch', '?')} rows of {flat.get('data.seq_len', '?')} tokens a step"
    prints = str(summary.get("data_fingerprint") or "")[:12]
    code = str(summary.get("commit") or "")
    found = [
        ("model", f"{flat.get('model.kind', '?')}, {layers}: {', '.join(slots)}"),
        ("data", ", ".join(filter(None, [" ".join(filter(None, source)), rows, prints and f"fingerprint {prints}"]))),
        (
            "tokenizer",
            " ".join(str(flat[key]) for key in ("tokenizer.kind", "tokenizer.vocab_size", "tokenizer.path") if flat.get(key) is not None),
        ),
        ("code", f"lm {summary['version']}" if summary.get("version") else ""),
    ]
    if code:
        changed = ", with changes that are not committed" if code.endswith("+") else ""
        found[-1] = ("code", ", ".join(filter(None, [found[-1][1], f"commit {code.rstrip('+')}{changed}"])))
    return [(name, text) for name, text in found if text]


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
    """Returns for each source of a mixture: name, tokens read, their share, epochs, validation loss."""
    names = [source["name"] for source in run.config.get("data", {}).get("sources", [])]
    tokens, epochs, losses = ([run.number(f"{key}/{name}") for name in names] for key in ("tokens", "epochs", "val_loss"))
    total = sum(filter(None, tokens)) or 1
    return [
        (name, si(read or 0), f"{(read or 0) / total:.1%}", f"{turns or 0:.2f}", fixed(loss))
        for name, read, turns, loss in zip(names, tokens, epochs, losses, strict=True)
    ]


def _samples(text: str) -> list[tuple[str, str]]:
    """Returns (heading, text) per `## ` heading of samples.md, newest first; one untitled piece where there is no heading."""
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
