"""A study on disk: frozen before its first run, and the runs that it asks for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from lm.ablation.config import StudyConfig
from lm.ablation.matching import matched
from lm.ablation.probe import measured
from lm.ablation.runs import Asked
from lm.ablation.tuning import TunedRuns, plain_config
from lm.errors import ConfigError
from lm.schema import flatten
from lm.training.config import TrainConfig


class AskedStudy(Asked):
    """What is in study.json."""

    file: ClassVar[str] = "study.json"
    grows: ClassVar[str | None] = "study.seeds"

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


def new_study(folder: Path, config: StudyConfig, variants: Mapping[str, TrainConfig], begun: AskedStudy | None = None) -> Study:
    """Returns a study of these composed configs, matched as it asks; match=time measures steps, which run, unless the study has begun.

    Raises ConfigError where two are one, a knob does not reach, or a run would train nothing or need several processes.
    """
    plain = {name: plain_config(f"variants.{name}", cfg, config) for name, cfg in variants.items()}
    _refuse_equal(plain, config.tune)
    step_s = begun.step_s if begun is not None else {}
    if config.match == "time" and begun is None:
        step_s = measured(folder / "probe", plain, config.threads)
    study = Study(folder, AskedStudy(study=config, configs=matched(config, plain, step_s), step_s=step_s))
    _refuse_equal(study.variants, config.tune)
    study.missing()  # so that what cannot be tuned is told before anything is written
    return study


def read_study(folder: Path) -> Study:
    """Returns the study of a folder as it was frozen. Raises ConfigError where there is none."""
    if (asked := AskedStudy.read(folder)) is None:
        raise ConfigError(f"{folder}: there is no study here. Start one: lm ablate study=NAME.")
    return Study(folder, asked)


def _refuse_equal(variants: Mapping[str, TrainConfig], tuned: str | None) -> None:
    seen: dict[str, str] = {}
    for name, cfg in variants.items():
        tree = json.dumps({key: value for key, value in flatten(cfg.tree()).items() if key != tuned}, sort_keys=True)
        if tree in seen:
            rule = f"it changes nothing against {seen[tree]} that is not matched or tuned, seeds left aside"
            raise ConfigError(f"variants.{name}: {rule}. Change something else, or leave it out; seeds=5 says how many seeds.")
        seen[tree] = name
