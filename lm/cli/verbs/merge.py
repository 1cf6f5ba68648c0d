"""`lm merge FOLDER FOLDER ... out=FOLDER`: one model out of several of one architecture."""

from typing import Literal

from lm.cli.verb import Writing
from lm.errors import ConfigError
from lm.printing import say


class Merge(Writing):
    """usage: lm merge FOLDER FOLDER ... out=FOLDER [weights=0.5,0.5] [method=linear|slerp|ties] [base=FOLDER]

    Runs, models or checkpoints of one architecture and tokenizer become one model folder, which is what init_from=, lm generate, lm eval
    and lm export take. An adapter is merged into its model first, also where it is the only folder.
    """

    words = None

    weights: str | None = None
    """Of each model, with commas between; they are divided by their sum. null: equal ones."""
    method: Literal["linear", "slerp", "ties"] = "linear"
    """linear: the mean of the weights (Wortsman et al. 2022, arXiv:2203.05482); slerp: along the arc between two; ties: the mean of the
    largest changes of base that agree in sign (Yadav et al. 2023, arXiv:2306.01708)."""
    base: str | None = None
    """Of method=ties, the model that the others come from."""
    density: float | None = None
    """Of method=ties, the part of each model's changes that is kept. null: 0.2."""

    def run(self, rest: list[str]) -> None:
        """Prints one line on stdout; an argument is a folder if it exists or has no '='."""
        folders = self.folders(rest)
        try:
            weights = None if self.weights is None else [float(text) for text in self.weights.strip("[]").split(",")]
        except ValueError:
            raise ConfigError(f"weights={self.weights}: numbers are needed, with commas between. Write weights=0.5,0.5.") from None
        from lm.generation.merging import merge

        found = merge(
            folders, self.out, weights=weights, method=self.method, base=self.base, density=self.density, overwrite=self.overwrite
        )
        what = f"{self.method} of {len(folders)} models" if len(folders) > 1 else "the adapter merged into its model"
        say(f"{found}: {what}. {self.tried()}")
