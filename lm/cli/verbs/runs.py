"""`lm runs [FOLDER ...]`: what runs there are."""

import json
import os
import time
from dataclasses import asdict
from glob import has_magic
from pathlib import Path
from typing import Literal

from lm.cli.verb import Verb
from lm.errors import ConfigError
from lm.printing import answer, note, say
from lm.units import counted, fixed, si, sized, table

_UNITS = {
    "val_reward": "reward", "val_pair_loss": "pair loss", "val_answer_loss": "answer loss", "val_bits_per_byte": "bits/byte",
    "val_loss": "loss",
}  # fmt: skip


class Runs(Verb):
    """usage: lm runs [FOLDER ...] [format=json]

    One line for each run below the folders, or below runs/; the one that changed last stands at the end. Of a run that has ended, the
    checkpoints serve to train it longer and to start others from its steps: when they are removed, its model is still sampled, evaluated,
    exported and compared.
    """

    words = None

    format: Literal["text", "json"] = "text"
    """How the list is printed; json has the numbers in full."""

    def run(self, rest: list[str]) -> None:
        """Prints the list; an argument is a folder if it exists or has no '='."""
        given = [Path(os.path.expanduser(each)) for each in self.folders(rest) or ["runs"]]
        from lm.report.listing import listed
        from lm.report.run import run_folders
        from lm.storage.reading import closed
        from lm.storage.run_folder import RunFolder

        for folder in given:
            if not folder.exists() and not has_magic(str(folder)):
                raise ConfigError(f"{folder}: there is no such folder, and runs lie in one. Name that of run.dir=.")
        below = [run for folder in given for run in run_folders(folder)]
        runs, refused = listed([run for run in below if closed(run) or RunFolder(run).exists()])
        for sentence in refused:
            note(f"left out: {sentence}")
        if self.format == "json":
            answer(json.dumps([asdict(run) for run in runs], indent=1, allow_nan=False))
            return
        titles = ["run", "state", "objective", "from", "parameters", "validation", "size", "checkpoints", "changed"]
        rows = [
            [
                run.name, run.state, run.objective, run.init_from or "-", si(run.parameters),
                "-" if run.metric is None else f"{fixed(run.value)} {_UNITS[run.metric]}", sized(run.n_bytes),
                sized(run.checkpoint_bytes), time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed)),
            ]
            for run in runs
        ]  # fmt: skip
        if rows:
            answer(table([titles, *rows], ""))
        whole, within = sum(run.n_bytes for run in runs), sum(run.checkpoint_bytes for run in runs)
        say(f"{counted(len(runs), 'run')}, {sized(whole)}, {sized(within)} of it checkpoints")
