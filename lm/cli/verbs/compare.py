"""`lm compare RUN RUN ...`: a table, and one picture of the curves."""

from collections.abc import Sequence
from pathlib import Path

from lm.cli.compose.arguments import parse_literal
from lm.cli.views.text import listing
from lm.errors import ConfigError
from lm.schema import Config


class CompareConfig(Config):
    """Where the comparison goes."""

    out: str = "compare"
    """Folder for compare.png and compare.md."""


def run(args: Sequence[str]) -> int:
    """Prints the table; an argument is a run folder if it exists or has no '='."""
    folders = [Path(arg) for arg in args if Path(arg).exists() or "=" not in arg]
    config = parse_literal(CompareConfig, [arg for arg in args if Path(arg) not in folders])
    if not folders:
        raise ConfigError("compare: no run folder was given. Name at least one, as in lm compare runs/a runs/b.")
    from lm.report.page import compare

    out = Path(config.out)
    print(compare(folders, out))
    print(f"picture: {out / 'compare.png'}")
    return 0


def help_text(args: Sequence[str]) -> str:
    """Usage."""
    return f"usage: lm compare RUN RUN ... [out=FOLDER]\n\n{listing(CompareConfig)}"
