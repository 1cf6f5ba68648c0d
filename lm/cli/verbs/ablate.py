"""`lm ablate`: a comparison of variants that is planned, matched, tuned, repeated over seeds, and judged."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lm.ablation.config import StudyConfig, begun
from lm.cli.compose import catalog
from lm.cli.compose.arguments import overrides_of
from lm.cli.compose.compose import compose_config
from lm.cli.compose.overrides import expand
from lm.cli.verb import Verb
from lm.errors import ConfigError
from lm.printing import answer, say
from lm.schema import Tree, did_you_mean, from_tree

if TYPE_CHECKING:
    from lm.ablation.study import Study

DOINGS = ("plan", "run", "report", "noise")


class Ablate(Verb):
    """usage: lm ablate [plan|run|report|noise] [study=NAME] [overrides of lm train, with several values] [key=value ...]

    A study compares named variants with a baseline: sizes matched, the learning rate tuned for each alike, several seeds, differences
    paired by seed and corrected for the number of variants, and one of four verdicts: better, no better, equal within, cannot tell.

    lm ablate study=ablation/ffn                                   a file of recipes/; again: only what is missing
    lm ablate model/ffn=swiglu,geglu,gelu match=params knob=model.ffn.hidden tune=optim.lr      without a file
    lm ablate plan study=ablation/ffn                              runs, sizes and FLOPs, and nothing is run
    lm ablate report study=ablation/ffn                            what is known by now
    lm ablate noise recipes=pretrain/nano_long least_effect=0.005       how runs of one config spread, and the seeds that an effect takes
    """

    words = DOINGS
    takes = None

    study: str | None = None
    """A study of recipes/, a yaml file, or the name of one that began on the command line."""
    name: str | None = None
    """Folder of the study below `dir`. null: the study's name."""
    dir: str = "runs/studies"
    """Folder of all studies."""
    baseline: str | None = None
    """Variant that the others are compared with. null: what the file says, or the first one."""
    match: Literal["tokens", "params", "flops"] | None = None
    """What is equal beside the tokens. null: what the file says, or nothing."""
    knob: str | None = None
    """Setting that makes it so."""
    tune: str | None = None
    """Setting tuned for every variant alike, such as optim.lr."""
    seeds: int | None = Field(None, ge=2, le=1000)
    """Runs of each variant; more may be asked for later. null: what the file says, or 5."""
    metric: str | None = None
    """Figure of the summary that is compared; less is better."""
    least_effect: float | None = Field(None, ge=0)
    """The smallest difference worth acting on."""
    jobs: int = Field(1, ge=1, le=1024)
    """Runs side by side."""
    threads: int | None = Field(None, ge=1, le=1024)
    """Threads of each run. null: the cores divided by `jobs`."""

    def run(self, rest: list[str]) -> None:
        """Prints the plan or the verdicts on stdout, progress on stderr."""
        doing = rest[0] if rest and "=" not in rest[0] else "run"
        if doing not in DOINGS:
            raise ConfigError(f"ablate: {doing!r} is nothing to do with a study. {did_you_mean(doing, DOINGS)}")
        overrides = overrides_of(rest[1:] if rest and rest[0] == doing else rest)
        if doing == "noise":
            self._noise(overrides)
            return
        name, asked = _asked(self.study, overrides)
        folder = Path(os.path.expanduser(self.dir)) / (self.name or name)
        study = self._study(folder, None if doing == "report" and begun(folder) else asked)
        from lm.ablation.jobs import run_missing
        from lm.ablation.verdict import write_verdict
        from lm.cli.views.study import plan, verdicts

        if doing == "plan":
            answer(plan(study))
            return
        if doing == "run":
            study.freeze()
            run_missing(study, self.jobs)
        for line in verdicts(write_verdict(study)).split("\n"):
            say(line)
        say(f"report: {folder / 'report.md'}")

    def _study(self, folder: Path, asked: Tree | None) -> "Study":
        """The study that is asked for, composed before anything heavy is imported; None: the one that is there."""
        config = self._config(asked) if asked is not None else None
        variants = {name: compose_config([*config.overrides, *own]) for name, own in config.variants.items()} if config else {}
        from lm.ablation.study import new_study, read_study

        if asked is None:
            return read_study(folder)
        return new_study(folder, self._config(asked, read_study(folder).config.threads if begun(folder) else None), variants)

    def _noise(self, overrides: list[str]) -> None:
        config = compose_config(overrides)
        from lm.ablation.jobs import run_missing
        from lm.ablation.noise import NoiseRuns, told

        folder = Path(os.path.expanduser(self.dir)) / (self.name or f"noise-{config.run.name}"[:60])
        runs = NoiseRuns(folder, config, self.metric or "val_bits_per_byte", self.threads or self._threads())
        run_missing(runs, self.jobs)
        for line in told(runs.verdict(), [self.least_effect] if self.least_effect else [0.02, 0.01, 0.005]):
            say(line)

    def _threads(self) -> int:
        return max(1, (os.cpu_count() or 1) // self.jobs)

    def _config(self, asked: Tree, threads: int | None = None) -> StudyConfig:
        """What is asked, and what the command line says of it.  threads: of the runs that are there."""
        keys = ("baseline", "match", "knob", "tune", "seeds", "metric", "least_effect", "threads")
        said = {key: value for key in keys if (value := getattr(self, key)) is not None}
        tree = {"threads": threads or self._threads(), **asked, **said}
        return from_tree(StudyConfig, {"baseline": next(iter(asked.get("variants") or {"": None})), **tree}, self.study or "ablate")


def _asked(study: str | None, overrides: list[str]) -> tuple[str, Tree | None]:
    """The name of a study, and what it asks: of a recipe's block, a file, or overrides with several values. None: it has begun."""
    if study is None:
        return _swept(overrides)
    if study.endswith((".yaml", ".yml")):
        tree, name = catalog.read(Path(study)), Path(study).stem
    else:
        found = catalog.study(study)
        if found is None and not overrides:
            return study.replace("/", "-"), None
        if found is None:
            raise ConfigError(f"study={study}: no recipe of this name has a study. {did_you_mean(study, catalog.studies())}")
        tree, name = {**found, "overrides": [f"recipes={study}", *found.get("overrides", [])]}, study.replace("/", "-")
    return name, {**tree, "overrides": [*tree.get("overrides", []), *overrides]}


def _swept(overrides: list[str]) -> tuple[str, Tree]:
    """A variant for each combination of values, named by them."""
    jobs = expand(overrides)
    varied = [i for i in range(len(overrides)) if len({job[i] for job in jobs}) > 1]
    if not varied:
        raise ConfigError("ablate: there is one variant only. Name a study=, or several values of a key, as in model/ffn=swiglu,gelu.")
    variants = {_name(job, varied): [job[i] for i in varied] for job in jobs}
    shared = [override for i, override in enumerate(overrides) if i not in varied]
    keys = "+".join(overrides[i].partition("=")[0].split("/")[-1].split(".")[-1] for i in varied)
    return f"{keys}+{'+'.join(variants)}"[:60].strip("+"), {"variants": variants, "overrides": shared}


def _name(job: list[str], varied: list[int]) -> str:
    """The value where one key varies, each with its key where several do."""
    texts = [job[i].partition("=") for i in varied]
    parts = [value if len(varied) == 1 else f"{key.split('/')[-1].split('.')[-1]}-{value}" for key, _, value in texts]
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join(parts)).strip("-.")
