"""Composed configs, checked and made fit to be compared."""

import json
from collections.abc import Mapping

from lm.ablation.config import TEST, figure_of
from lm.ablation.matching import moved
from lm.errors import ConfigError
from lm.schema import flatten
from lm.spelling import did_you_mean
from lm.training.config import TrainConfig
from lm.training.run_config import ResumeConfig

_TEST_FRAC = 0.5
_NO_RUN = {"name": "any", "dir": "any"}
"""Placeholder for the section `run` of a frozen config, as each run has a folder of its own."""


def plain_config(where: str, cfg: TrainConfig, metric: str) -> TrainConfig:
    """Returns a composed config without seed and folder; where the metric needs a test and the config has none, with half of the held-out
    text set aside for it.

    where: name of the config in errors.  Raises ConfigError where its runs would train nothing or need several processes.
    """
    if cfg.check or cfg.plan:
        raise ConfigError(f"{where}: {'check' if cfg.check else 'plan'}=true trains nothing that could be compared. Leave it out.")
    if cfg.strategy.launched:
        raise ConfigError(f"{where}: strategy={cfg.strategy.kind} starts ranks, and a run of a study is one process. Leave it out.")
    if cfg.trainer.early_stop is not None:
        raise ConfigError(f"{where}: trainer.early_stop ends a run before it has seen the tokens that all are told to see. Leave it out.")
    if cfg.resume != ResumeConfig():
        rule = "a study that goes on after a kill ends as one left alone"
        raise ConfigError(f"{where}: resume tells how a run goes on, and {rule}. Leave it out.")
    if cfg.trainer.max_minutes is not None:
        rule = "leaves a run's length to the clock, so that each would see other tokens"
        raise ConfigError(f"{where}: trainer.max_minutes {rule}. Set trainer.max_steps instead.")
    _require_metric(where, cfg, metric)
    plain = cfg.replace(run=_NO_RUN, seed=0)
    return moved(plain, "data.test_frac", _TEST_FRAC) if metric.startswith(TEST) and not cfg.data.test_frac else plain


def _require_metric(where: str, cfg: TrainConfig, metric: str) -> None:
    """Raises ConfigError for a metric that no run of the config has, or of which less is not better."""
    measure = cfg.objective.measure(None)
    common = ("loss", "bits_per_byte", "ece") if measure.of_text else ("loss",)
    further = [name for name in cfg.eval.figures() if not name.endswith("entropy")]
    known = [f"test_{name}" for name in (*common, *measure.less, *further)] + [f"val_{name}" for name in common[:2]]
    if metric not in known and metric.partition("/")[0].endswith("bits_per_byte") and not measure.of_text:
        rule = f"objective={cfg.objective.kind} learns no text, whose bits could be counted"
        raise ConfigError(f"metric={metric}: {rule}. Say one of {', '.join(known)}.")
    if metric not in known:
        remedy = "Set eval.seq_len or eval.own_tokens for what is asked beside the loss"
        raise ConfigError(
            f"metric={metric}: no run of {where} tells such a figure, of which less is better. {remedy}. {did_you_mean(metric, known)}"
        )


def refuse_equal(variants: Mapping[str, TrainConfig], tuned: str | None = None) -> None:
    """Raises ConfigError where two variants differ at most in the tuned setting."""
    seen: dict[str, str] = {}
    for name, cfg in variants.items():
        tree = json.dumps({key: value for key, value in flatten(cfg.tree()).items() if key != tuned}, sort_keys=True)
        if tree in seen:
            rule = f"it changes nothing against {seen[tree]} that is not matched or tuned, seeds left aside"
            raise ConfigError(f"variants.{name}: {rule}. Change something else, or leave it out; seeds=5 says how many seeds.")
        seen[tree] = name


def refuse_other_figures(variants: Mapping[str, TrainConfig], baseline: str, metric: str) -> None:
    """Raises ConfigError where the metric is another figure in a variant than in the baseline: per token of another tokenizer, a loss that
    depends on the objective's options, or one that is of labels, pairs or numbers in one and not in the other."""
    base, figure = variants[baseline], figure_of(metric)
    ours = base.objective.measure(None)
    for name, cfg in variants.items():
        measure = cfg.objective.measure(None)
        if measure.of_text and figure not in ("bits_per_byte", "error") and cfg.tokenizer != base.tokenizer:
            given = f"metric={metric} is per token, and variants.{name} has other tokens than {baseline}"
            raise ConfigError(f"{given}, so that they do not compare. Say metric={metric.partition('_')[0]}_bits_per_byte.")
        of_other = figure != "error" and type(measure) is not type(ours) and not (measure.of_text and ours.of_text)
        if of_other or cfg.objective.decides(figure) != base.objective.decides(figure):
            given = f"metric={metric} is another figure in variants.{name} than in {baseline}, whose objective differs"
            shared = [each for each in ours.less if each in measure.less and each not in ("ece", ours.learned)]
            shared = [each for each in shared if cfg.objective.decides(each) == base.objective.decides(each)]
            remedy = f"Say metric=test_{shared[0]}" if shared else "Vary one objective at a time"
            raise ConfigError(f"{given}, so that they do not compare. {remedy}.")
