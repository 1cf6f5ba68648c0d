"""`lm compare RUN RUN ...`: a table, and one picture of the curves."""

from pathlib import Path

from lm.cli.verb import Writer
from lm.errors import ConfigError
from lm.printing import say


class Compare(Writer):
    """usage: lm compare RUN RUN ... [out=FOLDER] [overwrite=true]

    Without out=, what an earlier comparison has written is replaced.
    """

    out: str = "compare"
    """Folder to write compare.png and compare.md into."""

    def run(self, rest: list[str]) -> None:
        """Prints the table; an argument is a run folder if it exists or has no '='."""
        folders = [arg for arg in rest if Path(arg).exists() or "=" not in arg]
        self.refuse([arg for arg in rest if arg not in folders])
        if not folders:
            raise ConfigError("compare: no run folder was given. Name at least one, as in lm compare runs/a runs/b.")
        from lm.report.page import compare

        found = compare(folders, self.out, overwrite=self.overwrite or "out" not in self.model_fields_set)
        for line in found.split("\n"):
            say(line)
        say(f"picture: {Path(self.out) / 'compare.png'}")
