"""`lm average RUN out=FOLDER`: one model out of a run's newest checkpoints."""

from pydantic import Field

from lm.cli.verb import Writing
from lm.errors import ConfigError
from lm.printing import say


class Average(Writing):
    """usage: lm average RUN out=FOLDER [last=N]

    The mean of the weights of a run's checkpoints becomes a model folder, which is what init_from=, lm generate, lm eval and lm
    export take. A run keeps as many as checkpoint.keep_last says.
    """

    words = None

    last: int | None = Field(None, gt=1)
    """How many, the newest. null: all that the run keeps."""

    def run(self, rest: list[str]) -> None:
        """Prints one line on stdout."""
        runs = self.folders(rest)
        if len(runs) != 1:
            raise ConfigError(f"average: {len(runs)} runs were given, and checkpoints of one are averaged. Write lm average runs/NAME.")
        from lm.generation.merging import average

        found = average(runs[0], self.out, last=self.last, overwrite=self.overwrite)
        which = "all checkpoints" if self.last is None else f"{self.last} checkpoints"
        say(f"{found}: the mean of {which}. {self.tried()}")
