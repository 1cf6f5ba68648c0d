"""The comparison of runs: a table in any format, and a chart."""

import os.path
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from lm.errors import ConfigError, expect
from lm.report.collect import collect
from lm.report.curves import AXES, comparison_png, unplotted
from lm.report.run import Axis
from lm.report.tables import FORMATS, in_markdown, markdown
from lm.schema import Tree
from lm.spelling import did_you_mean
from lm.storage.atomic import replace_file
from lm.storage.out import out_folder, require_free

SEEDS = (
    "± is the standard error over seeds. Differences are over the seeds shared with the baseline, with an interval (paired t-test, 95 %,"
    " corrected by Holm for the number of rows); * excludes 0."
)
_ENDINGS = {"txt": "text"} | {name: name for name in FORMATS}


def compare(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | Path | None = None,
    overwrite: bool = False,
    *,
    format: Literal["text", "md", "tex", "csv", "json"] = "text",
    x: Axis = "tokens",
    baseline: str | None = None,
    as_of_today: Callable[[Tree], Tree] = dict,
) -> str:
    """Returns a table of runs, the lowest metric first, with the differences between their configs, and notes on an unfair comparison.

    runs: one or several folders of runs or sweeps, or globs; runs that cannot be read are left out and named in the notes. out: a folder
    for compare.md and the curves against `x` as compare.png, or a file for the table in the format of its ending; it must not exist, or
    with `overwrite` may be an earlier comparison's. baseline: the run that the others are compared with; None: the first one.
    as_of_today: gives a saved config the defaults of keys that were added to lm since, which else stand as differences to newer runs.
    Raises ConfigError where no run is left, CheckpointError where the only one is damaged, ResourceError where `out` cannot be written.
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
    comparison = collect([Path(run) for run in listed], baseline, x, as_of_today)
    notes = [*comparison.notes, *unplotted(comparison)]
    if comparison.repeated:
        notes = [SEEDS, *notes]
    if out is not None and (told := table_format(out)) is not None:
        replace_file(_free_file(Path(os.path.expanduser(out)), overwrite), FORMATS[told](comparison, notes))
    elif out is not None:
        with out_folder(require_free(out, overwrite), overwrite) as folder:
            comparison_png(comparison, folder / "compare.png")
            pieces = (
                markdown(comparison, []),
                f"![{comparison.title} against {AXES[x]}, a curve for each run](compare.png)\n",
                "".join(f"- {in_markdown(note)}\n" for note in notes),
            )
            (folder / "compare.md").write_text("\n".join(filter(None, pieces)), encoding="utf-8", errors="backslashreplace")
    return FORMATS[format](comparison, notes).rstrip("\n")


def table_format(out: str | Path) -> str | None:
    """Returns the table format that a path's ending names; None where the path is a folder. Raises ConfigError for an unknown ending."""
    if str(out).endswith("/") or Path(os.path.expanduser(out)).is_dir():
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
