"""`lm average RUN last=5 out=FOLDER`: one model out of a run's newest checkpoints."""

from pydantic import Field

from lm.cli.verb import Writer
from lm.errors import ConfigError
from lm.printing import say


class Average(Writer):
    """usage: lm average RUN out=FOLDER [last=5]

    The mean of the weights of a run's newest checkpoints becomes a model folder, which is what init_from=, lm generate, lm eval and lm
    export take. A run keeps as many as checkpoint.keep_last says.
    """

    words = None

    last: int = Field(5, gt=1)
    """How many of the newest checkpoints."""

    def run(self, rest: list[str]) -> None:
        """Prints one line on stdout."""
        runs = self.folders(rest)
        if len(runs) != 1:
            raise ConfigError(f"average: {len(runs)} runs were given, and checkpoints of one are averaged. Write lm average runs/NAME.")
        from lm.generation.merging import average

        found = average(runs[0], self.out, last=self.last, overwrite=self.overwrite)
        say(f"{found}: the mean of {self.last} checkpoints. {self.tried()}")
