"""`lm compare RUN RUN ...`: a table, and one picture of the curves."""

from pathlib import Path

from lm.cli.verb import Verb
from lm.errors import ConfigError
from lm.printing import say


class Compare(Verb):
    """usage: lm compare RUN RUN ... [out=FOLDER]"""

    out: str = "compare"
    """Folder for compare.png and compare.md."""

    def run(self, rest: list[str]) -> None:
        """Prints the table; an argument is a run folder if it exists or has no '='."""
        folders = [arg for arg in rest if Path(arg).exists() or "=" not in arg]
        self.refuse([arg for arg in rest if arg not in folders])
        if not folders:
            raise ConfigError("compare: no run folder was given. Name at least one, as in lm compare runs/a runs/b.")
        from lm.report.page import compare

        for line in compare(folders, self.out).split("\n"):
            say(line)
        say(f"picture: {Path(self.out) / 'compare.png'}")
