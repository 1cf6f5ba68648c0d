"""`lm compare RUN RUN ...`: a table, and one picture of the curves."""

from functools import partial
from pathlib import Path
from typing import Literal

from lm.cli.listing import known
from lm.cli.verb import Writing
from lm.errors import ConfigError, ResourceError
from lm.printing import answer, note, say


class Compare(Writing):
    """usage: lm compare RUN RUN ... [baseline=RUN] [out=FOLDER] [format=csv] [x=time]

    A folder may be that of one run, or of several, as a sweep leaves them. Runs that cannot be read are left out, and named. Without out=,
    what an earlier comparison has written is replaced.
    """

    words = None

    out: str = "compare"
    """Folder to write compare.png and compare.md into, or a file for the table alone, such as table.csv, .md, .tex or .json."""
    format: Literal["text", "md", "tex", "csv", "json"] = "text"
    """How the table is printed; csv and json have the numbers in full."""
    x: Literal["step", "tokens", "flops", "time"] = "tokens"
    """What the curves are drawn against; time is that of the training steps alone. Seeds of one config make a band."""

    baseline: str | None = None
    """Run that the others are compared with. null: that of the study's baseline, where the first folder is a study; else the first one."""

    def run(self, rest: list[str]) -> None:
        """Prints the table; an argument is a run folder if it exists or has no '='."""
        folders = self.folders(rest)
        if not folders:
            raise ConfigError("compare: no run folder was given. Name at least one, as in lm compare runs/a runs/b.")
        from lm.report.compare import compare, table_format

        alone = table_format(self.out) is not None
        replaced = self.overwrite or "out" not in self.model_fields_set
        baseline = self.baseline or _of_study(Path(folders[0]))
        compared = partial(
            compare, folders, overwrite=replaced, format=self.format, x=self.x, baseline=baseline, as_of_today=known.as_of_today
        )
        try:
            made = compared(self.out)
        except ResourceError as error:
            if "out" in self.model_fields_set:
                raise
            answer(compared(None))
            note(f"no picture: {error} Or say out=FOLDER.")
            return
        answer(made)
        tell = say if self.format == "text" else note  # stdout may be read by a program
        tell(f"table: {self.out}" if alone else f"picture: {Path(self.out) / 'compare.png'}")


def _of_study(folder: Path) -> str | None:
    """Returns the first run of the baseline, where the folder is a study's; None where it is not, or that run does not exist yet."""
    if not (folder / "study.json").is_file():
        return None
    from lm.ablation.study import AskedStudy
    from lm.schema import flatten

    variant = flatten(AskedStudy.unread(folder) or {}).get("study.baseline")
    note(f"{folder}: the baseline is that of the study, {variant}. Its verdicts: lm ablate report study={folder.name} dir={folder.parent}")
    run = folder / f"{variant}-seed-0"
    return str(run) if run.is_dir() else None
