"""`lm ablate`: a comparison of variants that is planned, matched, tuned, repeated over seeds, and judged."""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from pydantic import Field

from lm.ablation.config import Match, RunsConfig, StudyConfig, refuse_own
from lm.ablation.scaling.config import LADDER, Count, LadderConfig
from lm.cli.compose.arguments import overrides_of
from lm.cli.compose.asking import LONGEST, asked, begun_folder, extended, listed, varied
from lm.cli.compose.compose import compose
from lm.cli.compose.naming import cut
from lm.cli.compose.sizes import sizes
from lm.cli.compose.variants import check, composed
from lm.cli.listing import known
from lm.cli.verb import Verb
from lm.errors import ConfigError
from lm.printing import answer, note, say, width
from lm.schema import Tree, from_tree, members
from lm.spelling import did_you_mean
from lm.units import fitted, table

if TYPE_CHECKING:
    from lm.ablation.running.jobs import Place
    from lm.ablation.study import AskedStudy, Study

DOINGS = ("plan", "run", "report", "noise")
_OF_CLUSTER = {"cluster", "partition", "minutes", "gpus", "sbatch"}
C = TypeVar("C", bound=RunsConfig)


class Ablate(Verb):
    """usage: lm ablate [plan|run|report|noise] [study=NAME] [overrides of lm train, with several values] [key=value ...]

    A study compares named variants with a baseline: sizes matched, the learning rate tuned for each alike, several seeds, differences
    paired by seed and corrected for the number of variants, and one of four verdicts: better, no better, equal within, cannot tell.

    lm ablate study=ablation/ffn                                   a file of recipes/; again: only what is missing
    lm ablate model/ffn=swiglu,geglu,gelu match=params knob=model.ffn.hidden tune=optim.lr      without a file
    lm ablate model/position=sinusoidal,alibi eval.seq_len=128,512 metric=test_loss/512         judged beyond the length of training
    lm ablate plan study=ablation/ffn              runs, sizes and FLOPs; nothing is run but the steps that match=time has to time
    lm ablate plan study=ablation/ffn check=true   also memory and time on this machine, from a few steps of each variant
    lm ablate study=ablation/ffn cluster=slurm partition=gpu gpus=1 jobs=20         as an array of jobs; again: waits for them
    lm ablate report study=ablation/ffn                            what is known by now
    lm ablate study=handed/in/lab name=again                       the same question once more, from another one's folder
    lm ablate sizes=64,96,128,192 tokens=0.5,1,2 recipes=ablation/base   a law of size and tokens; also with plan, report, flops=1e14
    lm ablate noise recipes=pretrain/nano_long model/ffn=swiglu,gelu    how runs spread, what pairing by seed saves, and the seeds it takes
    """

    words = DOINGS
    takes = None

    study: str | None = None
    """A study of recipes/, a yaml file, the name of one that began on the command line, or the folder of one: it goes on there, or with
    name= is run again, as its study.json says."""
    sizes: str | None = None
    """Instead of variants, three or more sizes to fit L = E + A/N^a + B/D^b to: widths, presets of model, or overrides in brackets."""
    tokens: list[float] | None = None
    """Of sizes=: lengths of the trainings, as multiples of the config's own. null: 0.5,1,2."""
    count: Count = "non_embedding"
    """Of sizes=: the parameters that N counts."""
    flops: list[float] = []
    """Of sizes=: FLOPs, C = 6 N D, whose best N and D are told."""
    at: list[str] = []
    """Of sizes=: N:D, parameters and tokens, whose loss is told."""
    name: str | None = None
    """Folder of the study below `dir`. null: the study's name."""
    dir: str = "runs/studies"
    """Folder of all studies."""
    baseline: str | None = None
    """Variant that the others are compared with. null: what the file says, or the first one."""
    match: Match | None = None
    """What is equal beside the tokens, or instead of them. null: what the file says, or nothing."""
    knob: str | None = None
    """Setting that makes it so."""
    tune: str | None = None
    """Setting tuned for every variant alike, such as optim.lr; null: none. What is not given is as the file says."""
    tune_seeds: list[int] | None = Field(None, min_length=1)
    """Seeds of the tuning runs; none of them reports. null: what the file says, or 1000."""
    seeds: int | None = Field(None, ge=1, le=1000)
    """Runs of each variant; more may be asked for later. null: what the file says, or 5, or 1 of sizes."""
    metric: str | None = None
    """Figure of the summary that is compared; less is better."""
    least_effect: float | None = Field(None, ge=0)
    """The smallest difference worth acting on."""
    give_up_after: int | None = Field(None, ge=2)
    """Seeds after which a variant that is no better by then gets no more; null: none is given up."""
    exchange: bool | None = None
    """Train the baseline at half and at twice its tokens too, so that differences are told in tokens."""
    check: bool = False
    """Of a plan: a few steps of each variant, which tell the time and the memory of its runs on this machine."""
    jobs: int = Field(1, ge=1, le=1024)
    """Runs side by side."""
    threads: int | None = Field(None, ge=1, le=1024)
    """Threads of each run. null: the cores divided by `jobs`; on a cluster 1."""
    cluster: Literal["slurm", "local"] | None = None
    """Where the runs go, as jobs that submitit submits and that go on without this command; local is this machine. null: here."""
    partition: str | None = None
    """Part of the cluster."""
    minutes: int = Field(60, ge=1)
    """Of a job of the cluster; after that the run is saved and waits in the queue to go on."""
    gpus: int = Field(0, ge=0)
    """Of a job of the cluster."""
    sbatch: list[str] = []
    """Further options of sbatch, each as sbatch=account=abc."""

    def run(self, rest: list[str]) -> None:
        """Prints the plan or the verdicts on stdout, progress on stderr."""
        doing, rest = (rest[0], rest[1:]) if rest and "=" not in rest[0] else ("run", rest)
        if doing not in DOINGS:
            raise ConfigError(f"ablate: {doing!r} is nothing to do with a study. {did_you_mean(doing, DOINGS)}")
        overrides = [listed(override) for override in overrides_of(rest)]
        if inner := [each for each in overrides if each.lstrip("+~").startswith("study.")]:
            raise ConfigError(
                f"{inner[0]}: what a study asks has no section on the command line. Write {inner[0].replace('study.', '', 1)}."
            )
        for key in (each.partition("=")[0].lstrip("+~") for each in overrides):
            own = get_close_matches(key, type(self).model_fields, n=1, cutoff=0.85) if key not in known.root().model_fields else []
            if own:
                raise ConfigError(f"{key}: there is no such key. Did you mean '{own[0]}'?")
        if self.cluster is None and (foreign := sorted(self.model_fields_set & _OF_CLUSTER)):
            raise ConfigError(f"{foreign[0]}: there is no cluster that it could be said to. Add cluster=slurm, or leave it out.")
        if self.check and doing != "plan":
            raise ConfigError("check=true: it tries what was planned, and compares nothing. Say lm ablate plan, or leave it out.")
        at = self._at_ladder()
        if doing == "noise":
            self._noise(overrides)
        elif at._climbs():
            at._ladder(doing, overrides)
        else:
            self._study(doing, overrides)

    def _study(self, doing: str, overrides: list[str]) -> None:
        frozen = begun_folder(self.study)
        name, question = asked(self.study, overrides) if frozen is None else (frozen.resolve().name, None)
        if question is not None and not self._exists(name):  # mistyped keys and values are told before anything heavy is imported
            config = self._config(StudyConfig, question, None)
            check("variants.", config.overrides, config.variants)
        from lm.ablation.judging.page import write_report
        from lm.ablation.judging.verdict import cells, verdict
        from lm.ablation.ledger import Ledger
        from lm.ablation.probe import tried
        from lm.ablation.running.jobs import run_missing
        from lm.ablation.study import AskedStudy, read_study
        from lm.cli.views.study import plan_text

        again = frozen is not None and bool(self.model_fields_set & {"name", "dir"})
        folder = frozen if frozen is not None and not again else self._folder(name)
        begun = AskedStudy.read(folder)
        if question is None:
            goes_on = f"study={self.study} is run again" if again else f"{folder} goes on"
            self._refuse_changes(doing, overrides, f"{folder} is reported" if doing == "report" else goes_on)
        if doing == "report" and (question is None or begun is None):
            study = read_study(folder)
        elif question is None:
            study = read_study(folder, frozen, self.seeds)
        else:
            study = self._asked_study(folder, question, begun)
        ledger = Ledger(folder.parent)
        for line in ledger.asked_before(study) if begun is None else ():
            note(line)
        if doing == "plan":
            answer(plan_text(study, tried(folder, dict(study.variants), study.threads) if self.check else {}))
            return
        if doing == "run":
            run_missing(study, self._place())
        found = verdict(study)
        for line in fitted(cells(found), width()).split("\n"):  # also where another user's folder can only be read
            say(line)
        write_report(study, found)
        ledger.note(study, found)
        say(f"report: {folder / 'report.md'}, {folder / 'report.html'}")

    def _asked_study(self, folder: Path, question: Tree, begun: "AskedStudy | None") -> "Study":
        from lm.ablation.study import new_study

        config = self._config(StudyConfig, question, begun.study if begun else None)
        configs = composed("variants.", config.overrides, config.variants)
        if config.match == "time" and self.cluster is not None and begun is None:
            raise ConfigError("match=time: it would measure this machine, and the runs go to others. Match flops, or leave cluster out.")
        study = new_study(folder, config, configs, begun)
        study.asked.agree(folder)
        return study

    def _refuse_changes(self, doing: str, overrides: list[str], what: str) -> None:
        """Raises ConfigError for what would change the question of a begun study; more seeds do not, unless it is only reported."""
        more_seeds = doing != "report" and self.seeds is not None
        but = "" if doing == "report" else ", but for seeds"
        if unread := sorted(self.model_fields_set & StudyConfig.model_fields.keys() - {*["seeds"] * more_seeds}) + overrides:
            raise ConfigError(f"{unread[0]}: {what} as it was asked for{but}. Leave it out, or repeat the command that began it.")

    def _noise(self, overrides: list[str]) -> None:
        if foreign := sorted(self.model_fields_set - {"name", "dir", "metric", "least_effect", "jobs", "threads", *_OF_CLUSTER}):
            raise ConfigError(f"{foreign[0]}: lm ablate noise runs every config with seeds of its own, and judges none. Leave it out.")
        shared, variants = varied(refuse_own(overrides))
        configs = composed("variants.", shared, variants or {"baseline": []})
        from lm.ablation.noise import AskedNoise, noise_runs, told, verdict
        from lm.ablation.running.jobs import run_missing

        folder = self._folder(cut(f"noise-{compose(shared).full()['run']['name']}", LONGEST))
        begun = AskedNoise.read(folder)
        threads = self.threads or (begun.threads if begun else self._threads())
        runs = noise_runs(folder, configs, threads, self.metric or "val_bits_per_byte")
        for each in runs.values():
            run_missing(each, self._place())
        for line in told(verdict(runs), [self.least_effect] if self.least_effect else [0.02, 0.01, 0.005]):
            say(line)

    def _at_ladder(self) -> Self:
        """Returns the same with the name and place of a begun ladder, where study= is its folder or ladder.json."""
        path = Path(os.path.expanduser(self.study or ""))
        folder = path.parent if path.name == LADDER else path
        if os.sep not in (self.study or "") or self.model_fields_set & {"name", "dir"} or not (folder / LADDER).is_file():
            return self
        return self.model_copy(update={"study": folder.name, "dir": str(folder.parent)})

    def _climbs(self) -> bool:
        """Whether a ladder is meant: sizes are given, or the begun study is one. Raises ConfigError for keys that belong to the other."""
        began = self.study is not None and self._exists(self.study, LADDER)
        given = self.model_fields_set
        if self.sizes is None and not began:
            if foreign := sorted(given & {"tokens", "count", "flops", "at"}):
                raise ConfigError(f"{foreign[0]}: only a ladder of sizes takes it. Give sizes=64,96,128,192, or the study= that one began.")
            return False
        others = {"baseline", "match", "knob", "least_effect", "give_up_after", "exchange", "check", *["study"] * (self.sizes is not None)}
        if foreign := sorted(given & others):
            raise ConfigError(f"{foreign[0]}: a ladder of sizes fits a law to losses, and compares no variants of a study. Leave it out.")
        return True

    def _ladder(self, doing: str, overrides: list[str]) -> None:
        own, name = self._sizes(overrides) if self.sizes is not None else ({}, str(self.study))
        from lm.ablation.running.jobs import run_missing
        from lm.ablation.scaling.extrapolate import Asking
        from lm.ablation.scaling.page import write_report
        from lm.ablation.scaling.report import tables
        from lm.ablation.scaling.runs import AskedLadder, Ladder, begun_ladder, new_ladder
        from lm.cli.views.ladder import plan_text

        asking, folder = Asking(self.count, self.flops, self.at), self._folder(name)
        begun = AskedLadder.read(folder)
        if self.sizes is None or (doing == "report" and begun is None):
            begun = begun_ladder(folder)
            config = self._config(LadderConfig, extended(begun.ladder.tree(), [], overrides), begun.ladder)
            ladder = Ladder(folder, begun.replace(ladder=config))
        else:
            config = self._config(LadderConfig, {"sizes": own, "overrides": overrides}, begun.ladder if begun else None)
            ladder = new_ladder(folder, config, composed("sizes: ", overrides, own))
        ladder.asked.agree(folder)
        asking.refuse_far(ladder.places(self.count))
        if doing == "plan":
            answer(plan_text(ladder, self.count))
            return
        if doing == "run":
            run_missing(ladder, self._place())
        for title, rows in tables(write_report(ladder, asking)).items():
            for line in (title, *table(rows).split("\n"), ""):
                say(line)
        say(f"report: {folder / 'report.md'}, {folder / 'report.html'}")

    def _sizes(self, overrides: list[str]) -> tuple[dict[str, list[str]], str]:
        """Returns the overrides of each size, and the ladder's name. Raises ConfigError for mistyped keys and values, before anything heavy
        is imported."""
        base = compose(overrides).full()
        own, name = sizes(str(self.sizes), base["model"]), cut(f"sizes-{base['run']['name']}", LONGEST)
        if not self._exists(name):
            check("sizes: ", overrides, own)
        return own, name

    def _exists(self, name: str, file: str = "") -> bool:
        """Whether there is a folder for a study of this name, or this file in it."""
        return os.path.lexists(Path(os.path.expanduser(self.dir), self.name or name, file))

    def _folder(self, name: str) -> Path:
        from lm.training.run_config import RunConfig

        return RunConfig(name=self.name or name, dir=self.dir).folder

    def _threads(self) -> int:
        return max(1, (os.cpu_count() or 1) // self.jobs) if self.cluster is None else 1

    def _place(self) -> "Place":
        from lm.ablation.running.cluster import Cluster, options_of
        from lm.ablation.running.jobs import Here

        if self.cluster is None:
            return Here(self.jobs)
        return Cluster(self.cluster, self.jobs, self.minutes, self.gpus, options_of(self.partition, self.sbatch))

    def _config(self, cls: type[C], asked: Tree, begun: C | None) -> C:
        """Returns the config of a study or ladder: `asked`, overridden by the command line.  begun: on disk; its threads and seeds apply
        where neither sets them."""
        shared = cls.model_fields.keys() & self.model_fields_set - {"sizes"}  # which is a text here
        given = {key: getattr(self, key) for key in sorted(shared)}
        said = {key: value for key, value in given.items() if value is not None or type(None) in members(cls.model_fields[key].annotation)}
        usual = {"threads": begun.threads, "seeds": begun.seeds} if begun else {"threads": self._threads()}
        config = from_tree(cls, {**usual, **asked, **said}, self.study or "ablate")
        return config.replace(seeds=max(begun.seeds, config.seeds)) if begun and self.seeds is None else config
