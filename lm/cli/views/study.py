"""A study as a table, before its runs."""

from lm.ablation.exchange import LENGTHS, branched, leaves
from lm.ablation.matching import size
from lm.ablation.study import Study
from lm.ablation.tuning import FACTORS
from lm.schema import flatten
from lm.units import counted, si, table


def plan(study: Study) -> str:
    """Returns a table of the variants' runs and their cost."""
    base = size(study.variants[study.config.baseline])
    rows = [("variant", "parameters", "against the baseline", "tokens a run", "FLOPs a run", str(study.config.moved or ""))]
    for name, cfg in study.variants.items():
        cost = size(cfg)
        value = flatten(cfg.tree()).get(str(study.config.moved), "")
        rows.append(
            (name, f"{cost.parameters:,}", f"{cost.parameters / base.parameters - 1:+.2%}", si(cost.tokens), si(cost.flops), str(value))
        )
    tuning = len(FACTORS) * len(study.config.tune_seeds) if study.config.tune else 0
    runs = len(study.variants) * (study.config.seeds + tuning)
    total = sum(size(cfg).flops for cfg in study.variants.values()) * (study.config.seeds + tuning)
    branches = ""
    if study.config.exchange:
        cfg = study.variants[study.config.baseline]
        lengths = {
            factor: size(branched(cfg, factor)).flops - base.flops * leaves(cfg, factor) / cfg.trainer.max_steps for factor in LENGTHS
        }
        runs, total = runs + len(lengths) * study.config.seeds, total + round(sum(lengths.values()) * study.config.seeds)
        factors = " and ".join(f"{factor:g}" for factor in lengths)
        branches = f" + {len(lengths)} x {study.config.seeds} of {study.config.baseline} at {factors} times its tokens"
    variants = counted(len(study.variants), "variant")
    tuned = f"{tuning} to tune {study.config.tune} + " if tuning else ""
    said = f"{counted(runs, 'run')}: {variants} x ({tuned}{study.config.seeds} seeds){branches}"
    timed = "".join(f"{name} takes {step_s:.4g} s a step, measured\n" for name, step_s in study.step_s.items())
    after = study.config.give_up_after
    less = f", less where a variant is given up after {after} seeds" if after is not None else ""
    return f"{table(rows, '')}\n\n{timed}{said}, {si(total)}FLOPs in all{less}"
