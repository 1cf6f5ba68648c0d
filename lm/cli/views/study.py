"""A study as a table, before its runs."""

from collections.abc import Mapping

from lm.ablation.exchange import LENGTHS, branched, leaves
from lm.ablation.matching import size
from lm.ablation.probe import Tried
from lm.ablation.study import Study
from lm.ablation.tuning import FACTORS
from lm.printing import width
from lm.schema import flatten
from lm.units import counted, duration, fitted, si


def plan_text(study: Study, tried: Mapping[str, Tried]) -> str:
    """Returns a table of the variants' runs and their cost.  tried: what a step of each takes here; {} where that is not known."""
    base = size(study.variants[study.config.baseline])
    rows = [("variant", "parameters", "against the baseline", "tokens a run", "FLOPs a run", str(study.config.moved or ""))]
    for name, cfg in study.variants.items():
        cost = size(cfg)
        value = flatten(cfg.tree()).get(str(study.config.moved), "")
        rows.append(
            (name, f"{cost.parameters:,}", f"{cost.parameters / base.parameters - 1:+.2%}", si(cost.tokens), si(cost.flops), str(value))
        )
    tuning = len(FACTORS) * len(study.config.tune_seeds) if study.config.tune else 0
    each = study.config.seeds + tuning
    runs, total = len(study.variants) * each, sum(size(cfg).flops for cfg in study.variants.values()) * each
    steps = {name: each * cfg.tokens(cfg.trainer.max_steps) / cfg.step_tokens for name, cfg in study.variants.items()}
    branches = ""
    if study.config.exchange:
        cfg = study.variants[study.config.baseline]
        lengths = {
            factor: size(branched(cfg, factor)).flops - base.flops * leaves(cfg, factor) / cfg.trainer.max_steps for factor in LENGTHS
        }
        runs, total = runs + len(lengths) * study.config.seeds, total + round(sum(lengths.values()) * study.config.seeds)
        steps[study.config.baseline] += study.config.seeds * sum(branched(cfg, f).trainer.max_steps - leaves(cfg, f) for f in LENGTHS)
        factors = " and ".join(f"{factor:g}" for factor in lengths)
        branches = f" + {len(lengths)} x {study.config.seeds} of {study.config.baseline} at {factors} times its tokens"
    variants = counted(len(study.variants), "variant")
    tuned = f"{tuning} to tune {study.config.tune} + " if tuning else ""
    said = f"{counted(runs, 'run')}: {variants} x ({tuned}{study.config.seeds} seeds){branches}"
    after = study.config.give_up_after
    less = f", less where a variant is given up after {after} seeds" if after is not None else ""
    return f"{fitted(rows, width())}\n\n{_timed(study, steps, runs, tried)}{said}, {si(total)}FLOPs in all{less}"


def _timed(study: Study, steps: Mapping[str, float], runs: int, tried: Mapping[str, Tried]) -> str:
    """Returns lines on what was measured.  steps: of all runs, by variant; one of fewer rows is a part of one."""
    step_s = {name: found.step_s for name, found in tried.items()} or study.step_s
    memory = {name: f", and {found.memory_gib:.2f} GiB at its peak" for name, found in tried.items()}
    lines = [f"{name} takes {seconds:.4g} s a step, measured{memory.get(name, '')}\n" for name, seconds in step_s.items()]
    if step_s:
        all_s = sum(step_s[name] * number for name, number in steps.items())
        starts_s = runs * max((found.start_s for found in tried.values()), default=0.0)
        starts = f", {counted(runs, 'start')} {duration(starts_s)}" if tried else ""
        lines.append(f"all steps take {duration(all_s)}{starts}, one run after another; validations and saves come on top\n")
    return "".join(lines)
