"""A study as tables: what would run, and what has come out."""

from lm.ablation.matching import size
from lm.ablation.study import FACTORS, Study
from lm.ablation.verdict import verdict_text
from lm.report.units import si, table
from lm.schema import Tree, flatten


def plan(study: Study) -> str:
    """What would run, and what it costs."""
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
    said = f"{runs} runs: {len(study.variants)} variants x ({tuning} to tune {study.config.tune} + {study.config.seeds} seeds)"
    return f"{table(rows, '')}\n\n{said if tuning else said.replace('0 to tune None + ', '')}, {si(total)}FLOPs in all"


def verdicts(found: Tree) -> str:
    rows = [("variant", found["metric"], "difference", "p", "verdict")]
    for name, row in found["variants"].items():
        told = row["difference"] or {}
        mean = f"{row['mean']:.4f}" if row["mean"] is not None else "-"
        away = f"{told['mean']:+.4f} [{told['interval'][0]:+.4f}, {told['interval'][1]:+.4f}]" if told.get("mean") is not None else "-"
        rows.append((name, mean, away, f"{told['p']:.3g}" if told.get("p") is not None else "-", verdict_text(found, name)))
    return table(rows, "")
