"""A study on disk: its question, frozen before the first run, and its runs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lm.ablation.config import StudyConfig
from lm.ablation.exchange import LENGTHS, branched, leaves, trunk
from lm.ablation.matching import matched
from lm.ablation.probe import measured
from lm.ablation.runs import Asked, Job
from lm.ablation.tuning import TunedRuns
from lm.ablation.variants import plain_config, refuse_equal, refuse_other_figures
from lm.errors import ConfigError
from lm.report.statistics import Difference, differences
from lm.spelling import did_you_mean
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig


class AskedStudy(Asked):
    """What is in study.json."""

    file = "study.json"
    grows = "study.seeds"

    study: StudyConfig
    """What the study was told."""
    configs: dict[str, TrainConfig]
    """The config of each variant, matched; seed, name and folder of a run are the study's."""
    step_s: dict[str, float] = {}
    """Seconds of a step by variant, where match=time measured them before the first run."""


class Study(TunedRuns):
    """`folder`/study.json, and one run folder beside it for each job."""

    config: StudyConfig

    def __init__(self, folder: Path, asked: AskedStudy) -> None:
        super().__init__(folder, asked, asked.study, asked.configs)
        self.step_s = asked.step_s

    def missing(self) -> list[Job]:
        """Returns the base's missing jobs, but jobs after an early look only once all jobs before it have ended, and branches only once the
        runs that they branch off have."""
        left, after = super().missing(), self.config.give_up_after or 0
        if any(job.tuned is not None for job in left):
            return left
        if before_look := [job for job in left if job.seed < after]:
            return before_look
        going_on = self.going_on()
        branches = [job for jobs in self.branches().values() for job in jobs if self.result(job) is None]
        return [job for job in left if job.variant in going_on] or branches

    def differences(self) -> dict[str, Difference]:
        """Returns the difference of each variant to the baseline."""
        results = {name: self.results(self.reporting(name)) for name in self.variants}
        baseline = results.pop(self.config.baseline)
        return differences(baseline, results, self.config.least_effect, range(self.config.give_up_after or 0))

    def going_on(self) -> set[str]:
        """Returns the variants that get all seeds: those not given up at the early look, and the baseline while any of them is left."""
        if self.config.give_up_after is None:
            return set(self.variants)
        left = {name for name, found in self.differences().items() if not found.given_up}
        return left | {self.config.baseline} if left else left

    def reporting(self, variant: str) -> list[Job]:
        """Returns the base's reporting jobs; runs of the baseline that others branch off keep the checkpoints needed for that."""
        found = super().reporting(variant)
        is_trunk = self.config.exchange and variant == self.config.baseline
        return [replace(job, config=trunk(job.config)) for job in found] if is_trunk else found

    def ended(self, variant: str) -> list[Job]:
        """Returns those of the `reporting` runs that have ended."""
        return [job for job in self.reporting(variant) if self.result(job) is not None]

    def ended_runs(self, variant: str | None = None) -> list[RunFolder]:
        """Returns the folders of the `ended` runs of a variant; None: of all variants."""
        return [self.run_of(job) for name in ([variant] if variant else self.variants) for job in self.ended(name)]

    def branches(self) -> dict[float, list[Job]]:
        """Returns the baseline's runs of other lengths, by their factor on its tokens; {} without exchange=true."""
        baseline = self.config.baseline
        trunks = self.reporting(baseline) if self.config.exchange else []
        if trunks and baseline not in self.going_on():
            trunks = trunks[: self.config.give_up_after]
        return {factor: [self._branch(job, factor) for job in trunks] for factor in LENGTHS if trunks}

    def _branch(self, job: Job, factor: float) -> Job:
        """Returns the branch of a baseline's run; no variant's run can have its name, which contains '@'."""
        name = f"{job.variant}@{factor:g}-seed-{job.seed}"
        shared = leaves(job.config, factor)
        own = self._job(name, job.variant, job.seed, branched(job.config, factor))
        return replace(own, trunk=(job.name, shared) if shared else None)


def new_study(folder: Path, config: StudyConfig, variants: Mapping[str, TrainConfig], begun: AskedStudy | None = None) -> Study:
    """Returns a study of these composed configs, matched as the config asks. With match=time this runs some steps of each variant to time
    them, unless the study has begun.

    Raises ConfigError where two variants are the same, the metric is another figure in each, a knob cannot match, or a run would train
    nothing or need several processes.
    """
    plain = {name: plain_config(f"variants.{name}", cfg, config.metric) for name, cfg in variants.items()}
    refuse_equal(plain, config.tune)
    refuse_other_figures(plain, config.baseline, config.metric)
    if (ramped := next((name for name, cfg in plain.items() if cfg.data.ramp), None)) and (config.match == "time" or config.exchange):
        asked = "exchange=true" if config.exchange else "match=time"
        raise ConfigError(f"{asked}: steps of the variant {ramped} have unlike batches, and this counts in steps. Drop its data.ramp.")
    step_s = begun.step_s if begun is not None else {}
    if config.match == "time" and begun is None:
        step_s = measured(folder / "probe", plain, config.threads)
    study = Study(folder, AskedStudy(study=config, configs=matched(config, plain, step_s), step_s=step_s))
    refuse_equal(study.variants, config.tune)
    if config.exchange:
        trunk(study.variants[config.baseline])
    study.missing()  # raises for a setting that cannot be tuned, before anything is written
    return study


def read_study(folder: Path, frozen: Path | None = None, seeds: int | None = None) -> Study:
    """Returns the study of a folder as it was frozen there, or in the folder `frozen`.

    seeds: how many are asked for now. None: as many as then. Raises ConfigError where there is none, another one has begun in `folder`, or
    it has more seeds.
    """
    if (asked := AskedStudy.read(frozen or folder)) is None:
        begun = sorted(file.parent.name for file in folder.parent.glob(f"*/{AskedStudy.file}"))
        remedy = did_you_mean(folder.name, begun) if begun else "Start one, such as lm ablate study=ablation/ffn."
        raise ConfigError(f"{folder}: there is no study here. {remedy}")
    if seeds is not None:
        asked = asked.replace(study=asked.study.replace(seeds=seeds))
    asked.agree(folder)
    return Study(folder, asked)
