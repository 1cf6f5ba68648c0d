"""A ladder of sizes as a table, before its runs."""

from lm.ablation.scaling.config import Count
from lm.ablation.scaling.law import Point
from lm.ablation.scaling.runs import Ladder
from lm.ablation.tuning import FACTORS
from lm.units import counted, si, table


def plan_text(ladder: Ladder, count: Count) -> str:
    """Returns a table of the runs and their cost."""
    head = "non-embedding parameters (N)" if count == "non_embedding" else "parameters (N)"
    rows = [("size", head, *(f"tokens x {times:g}" for times in ladder.config.tokens), "6 N D of the longest")]
    found = ladder.cells()
    for name in ladder.config.sizes:
        cells = [cell for cell in found if cell.rung.size == name]
        n, tokens = cells[0].n(count), [cell.cost.tokens for cell in cells]
        rows.append((name, f"{n:,}", *map(si, tokens), f"{si(Point(n, max(tokens), 0).flops)}FLOPs"))
    tuning = len(FACTORS) * len(ladder.config.tune_seeds) if ladder.config.tune else 0
    each = ladder.config.seeds + tuning
    pairs = f"{counted(len(ladder.config.sizes), 'size')} x {counted(len(ladder.config.tokens), 'length')}"
    told = f"({tuning} to tune {ladder.config.tune} + {counted(ladder.config.seeds, 'seed')})" if tuning else counted(each, "seed")
    total = each * sum(cost.flops for cost in ladder.costs.values())
    return f"{table(rows, '')}\n\n{counted(len(ladder.rungs) * each, 'run')}: {pairs} x {told}, {si(total)}FLOPs in all"
