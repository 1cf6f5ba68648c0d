"""The results of a study, as a tree and as text."""

import math
from dataclasses import asdict
from typing import NamedTuple

from lm.ablation.exchange import LENGTHS, branched
from lm.ablation.judging.again import HOW, asked, command, made, ran
from lm.ablation.judging.alike import lacking, unlike
from lm.ablation.judging.text import covers, of_text, other_texts, sampled
from lm.ablation.judging.verdict_schema import Found
from lm.ablation.judging.worth import in_tokens, percent, short_of
from lm.ablation.matching import size
from lm.ablation.study import Study
from lm.report.statistics import ALPHA, Difference, Worth, worth
from lm.report.tables import in_markdown, in_pipes
from lm.schema import Tree, flatten, from_tree
from lm.storage.run_folder import without_nan
from lm.units import counted, si

FEW_SEEDS = 5
CURVES = ("val_bits_per_byte", "val_loss", "loss")
"""Metrics over training that are drawn."""


def verdict(study: Study) -> Tree:
    """Returns the content of verdict.json; it depends on the runs alone, so that it is the same after a kill."""
    config, found = study.config, study.differences()
    results = {name: study.results(study.reporting(name)) for name in study.variants}
    lengths = {1.0: results[config.baseline], **{factor: study.results(jobs) for factor, jobs in study.branches().items()}}
    worths = {name: worth(lengths, results[name], told.level) for name, told in found.items() if len(lengths) > 1 and told.mean is not None}
    variants = {name: _variant(study, name, results[name], found.get(name), worths.get(name)) for name in study.variants}
    factors = sorted([1.0, *LENGTHS]) if config.exchange else []
    exchange = {f"{factor:g}": _length(study, factor, lengths.get(factor, {})) for factor in factors} or None
    told = {
        "study": study.folder.name,
        "hash": study.hash,
        "metric": config.metric,
        "units": {metric: study.unit(metric) for metric in sorted({config.metric, study.tuning_metric, *CURVES})},
        "baseline": config.baseline,
        "match": config.match,
        "knob": config.moved,
        "least_effect": config.least_effect,
        "seeds": config.seeds,
        "give_up_after": config.give_up_after,
        "level": ALPHA,
        "exchange": exchange,
        **made(study),
        "variants": variants,
        "warnings": _warnings(study, variants, found, exchange),
    }
    return from_tree(Found, told, "verdict.json").tree()


def report(found: Tree) -> str:
    """Returns report.md: a table, one sentence per variant for a paper, the method, warnings, and how to run it again."""
    sizes = [row["size"] for row in found["variants"].values()]
    costs = [("parameters", "tokens", "FLOPs"), *((f"{size['parameters']:,}", si(size["tokens"]), si(size["flops"])) for size in sizes)]
    table = [(*row, *cost) for row, cost in zip(cells(found), costs, strict=True)]
    parts = [f"# {found['study']}", in_pipes(table), "\n".join(f"> {sentence}" for sentence in sentences(found)), method(found)]
    if found["warnings"]:
        parts.append("## Before believing it\n\n" + "\n".join(f"- {warning}" for warning in found["warnings"]))
    pipes = in_pipes([("runs", "overrides"), *((in_markdown(name), in_markdown(told)) for name, told in asked(found).items())])
    parts.append(f"## Reproduce\n\n{pipes}\n\n{in_markdown(ran(found))} {HOW}\n\n    {command(found)}")
    return "\n\n".join(parts) + "\n"


class Row(NamedTuple):
    """A variant in the table of verdict.json.  worth: '' where the baseline runs at no other lengths."""

    variant: str
    metric: str
    difference: str
    p: str
    verdict: str
    tuned: str
    worth: str


def cells(found: Tree) -> list[tuple[str, ...]]:
    """Returns the table of verdict.json, its head first."""
    metric = f"{found['metric']} (mean of {found['seeds']} seeds)"
    head = Row("variant", metric, "difference [95 %, Holm]", "p (Holm)", "verdict", "tuned", "worth in tokens [95 %]")
    return [row if found["exchange"] else row[:-1] for row in (head, *rows(found).values())]


def rows(found: Tree) -> dict[str, Row]:
    """Returns each variant's row of the table of verdict.json, by name."""
    table: dict[str, Row] = {}
    for name, row in found["variants"].items():
        told, tuned, tuning = row["difference"] or {}, row["tuned"], row["tuning"]
        mean = f"{row['mean']:.4f}" if row["mean"] is not None else "-"
        mean += f" (of {len(row['runs'])})" if 0 < len(row["runs"]) < found["seeds"] else ""
        away = f"{told['mean']:+.4f} [{told['interval'][0]:+.4f}, {told['interval'][1]:+.4f}]" if told.get("mean") is not None else "-"
        away += f", of the text ±{row['text']['half']:.4f}" if row["text"] else ""
        p = f"{told['p']:.3g}" if told.get("p") is not None else "-"
        value = f"{tuning['ended']} of {tuning['runs']} runs" if tuning else "-"
        if tuned:
            value = f"{tuned['value']:.3g}{' (edge)' if tuned['at_edge'] else ''}"
        none = "failed" if row["failed"] else "not run yet"
        said = none if told and not row["runs"] else _verdict(told)
        table[name] = Row(name, mean, away, p, said, value, percent(row["worth"], told) if found["exchange"] else "")
    return table


def _verdict(difference: Tree) -> str:
    """Returns the verdict in words; where it is undecided, with the number of seeds that would decide it."""
    if not difference:
        return "baseline"
    more = difference["more_seeds"]
    if difference["given_up"]:
        return f"{difference['verdict']} (given up after {len(difference['pairs'])} seeds)"
    return difference["verdict"] + (f" ({counted(more, 'more seed')} would)" if more else "")


def _length(study: Study, factor: float, runs: dict[int, float]) -> Tree:
    return {"tokens": size(branched(study.variants[study.config.baseline], factor)).tokens, "runs": _by_seed(runs)}


def _by_seed(runs: dict[int, float]) -> Tree:
    return {str(seed): value if math.isfinite(value) else None for seed, value in sorted(runs.items())}


def _variant(study: Study, name: str, runs: dict[int, float], difference: Difference | None, tokens: Worth | None) -> Tree:
    known = [value for value in runs.values() if math.isfinite(value)]
    tuned, cost = study.tuned(name), size(study.variants[name])
    tried = {f"{value:.4g}": metric if math.isfinite(metric) else None for value, metric in tuned.tried.items()} if tuned else None
    return {
        "overrides": study.config.variants[name],
        "runs": _by_seed(runs),
        "diverged": len(runs) - len(known),
        "mean": sum(known) / len(runs) if known and len(known) == len(runs) else None,
        "tuned": {
            "key": study.config.tune,
            "metric": study.tuning_metric,
            "value": tuned.best,
            "at_edge": tuned.at_edge,
            "tried": tried,
        }
        if tuned
        else None,
        "tuning": _tuning(study, name) if study.config.tune and not tuned else None,
        "size": {**asdict(cost), "flops": float(cost.flops)},  # an int may exceed 64 bits in a large study
        "knob": flatten(study.variants[name].tree()).get(str(study.config.moved)) if study.config.moved else None,
        "step_s": study.step_s.get(name),
        "difference": without_nan(asdict(difference)) if difference is not None else None,
        "text": of_text(study, name, difference) if difference is not None else None,
        "worth": asdict(tokens) if tokens is not None else None,
        "failed": next(filter(None, map(study.why_failed, [*study.tuning(name), *study.reporting(name)])), None),
    }


def _tuning(study: Study, name: str) -> Tree:
    """Returns the progress of a variant's tuning: runs ended, and runs in all."""
    results = [study.result(job) for job in study.tuning(name)]
    return {"ended": sum(result is not None for result in results), "runs": len(results)}


def _warnings(study: Study, variants: Tree, found: dict[str, Difference], exchange: Tree | None) -> list[str]:
    config, going_on = study.config, study.going_on()
    base = variants[config.baseline]["size"]
    notes = []
    if config.seeds < FEW_SEEDS:
        notes.append(
            f"{config.seeds} seeds are few: an interval of them is wide and leans on normality. Ask for seeds={FEW_SEEDS} or more."
        )
    if config.tune is None:
        notes.append("No setting was tuned, so a variant that wants another learning rate loses by it. Say tune=optim.lr.")
    elif not config.tests:
        notes.append(f"Validation text chose {config.tune} and judges what it chose. Say metric=test_bits_per_byte.")
    for name, row in variants.items():
        if row["tuned"] and row["tuned"]["at_edge"]:
            notes.append(f"{name}: the best {config.tune} lies at the edge of what was tried. Start from another value.")
        if abs(row["size"]["parameters"] / base["parameters"] - 1) > 0.01:
            notes.append(f"{name}: {row['size']['parameters']:,} parameters against {base['parameters']:,}. Say match=params knob=...")
        if row["size"]["tokens"] != base["tokens"]:
            notes.append(f"{name}: {row['size']['tokens']:,} tokens against {base['tokens']:,}, as match={config.match} makes it.")
        if row["diverged"]:
            said = "it has no mean, and is judged by a sign test over the pairs"
            notes.append(f"{name}: {row['diverged']} of {len(row['runs'])} runs diverged; {said}.")
        if tuning := row["tuning"]:
            notes.append(f"{name}: {tuning['ended']} of {tuning['runs']} tuning runs have ended. The same command runs the others.")
        elif len(row["runs"]) < config.seeds and name in going_on:
            notes.append(f"{name}: {len(row['runs'])} of {config.seeds} runs have ended. The same command runs the others.")
        if row["failed"]:
            notes.append(f"{name}: a run failed: {row['failed']}")
    for name, difference in found.items():
        if difference.interval is not None and difference.interval[0] < 0 < difference.interval[1]:
            notes.append(f"{name}: the difference is within the noise of {len(difference.pairs)} seeds.")
        if difference.pairs and not any(difference.pairs):
            same = f"{config.metric} is that of {config.baseline} to the last digit, for every seed"
            notes.append(f"{name}: its {same}, as if what it changes were never used. Look whether it is what was meant.")
    notes += [*lacking(study), *other_texts(study), *unlike(study)]
    notes += short_of(config, exchange, variants)
    notes.append(f"Shown at {si(base['parameters'])} parameters and {si(base['tokens'])} tokens; rankings are known to change with both.")
    return notes


def sentences(found: Tree) -> list[str]:
    """Returns a sentence, ready for a paper, for each variant that has a difference."""
    base = found["baseline"]
    said = []
    for name, row in found["variants"].items():
        difference = row["difference"]
        if difference is None or (difference["p"] is None and not difference["given_up"]):
            continue
        n, told = len(difference["pairs"]), difference["verdict"]
        p = f"p = {difference['p']:.2g}" if difference["p"] is not None else "none"
        if difference["mean"] is None:
            lost = f"{row['diverged']} of {len(row['runs'])} runs of {name} and {found['variants'][base]['diverged']} of {base} diverged"
            tested = f"a sign test over {n} pairs of seeds gives {p} after Holm's correction"
            said.append(f"{lost}; {'it was given up' if difference['given_up'] else tested}: {told}.")
            continue
        low, high = difference["interval"]
        least = f" {found['least_effect']:g}" if told == "equal within" else ""
        tested = "at which it was given up" if difference["given_up"] else f"Holm-corrected {p}"
        said.append(
            f"Against {base}, {name} changes {found['metric']} by {difference['mean']:+.4f} (Holm-corrected 95 % interval {low:+.4f} to"
            f" {high:+.4f}, paired t-test over {n} seeds, {tested}{sampled(row['text'])}): {told}{least}.{in_tokens(row)}"
        )
    return said


def _looked(found: Tree) -> str:
    """Returns the method's sentence on giving variants up early; '' where no early look is asked for."""
    if (after := found["give_up_after"]) is None:
        return ""
    return f" After {after} seeds a variant of which that was so at {_each(found)} was given up, which lets no other one pass more easily."


def _each(found: Tree) -> str:
    """Returns a variant's part of the level of the study."""
    return f"{100 * found['level'] / max(1, len(found['variants']) - 1):.2g} %"


def _paired(found: Tree) -> str:
    """Returns the method's sentence on how much pairing by seed helped."""
    said = []
    for name, row in found["variants"].items():
        told = row["difference"] or {}
        if told.get("apart") is not None and told["pairing"] is not None:
            said.append(
                f"of {name} correlate by {told['pairing']:.2f}, so that {len(told['pairs'])} pairs say as much as {told['apart']} apart"
            )
    return f" Over seeds, runs of {found['baseline']} and those {'; those '.join(said)}." if said else ""


def _tuned(found: Tree) -> str:
    rows = [row["tuned"] for row in found["variants"].values() if row["tuned"] is not None]
    return f" {rows[0]['key']} was tuned for each alike, by {rows[0]['metric']} and with seeds of its own." if rows else ""


def method(found: Tree) -> str:
    """Returns the method section: how variants were compared, and what that assumes (item 7 of the NeurIPS checklist)."""
    least = f"{found['least_effect']:g}"
    steps = ", ".join(f"{name} {row['step_s']:.4g} s" for name, row in found["variants"].items() if row["step_s"])
    timed = f" Trainings take equally long by the seconds of a step that short runs in turns measured before: {steps}." if steps else ""
    tokens = (
        " What a difference is worth in tokens is read off the baseline's runs at half and at twice its tokens, with its rate and warm-up,"
        " between which the metric is taken to be straight over the logarithm of the tokens; in the interval are those numbers of tokens"
        " at which the paired t-test does not tell the two apart, and nothing is estimated beyond what ran."
        if found["exchange"]
        else ""
    )
    return (
        f"Each variant ran with the seeds 0 to {found['seeds'] - 1}, which move initial weights, data order and dropout. Differences are"
        " paired by seed; intervals are Student's t and assume that differences spread normally; they and p are corrected by Holm's"
        " procedure for the number of variants, and hold where the number of seeds was chosen before any verdict was read."
        " Better: the whole interval is below 0. No better: a gain of the least effect"
        f" ({least}) is excluded.{_looked(found)} Equal within: two one-sided tests at {_each(found)}, its part of the"
        " level, show less either way."
        f"{_paired(found)}{covers(found)}{tokens}{timed}{_tuned(found)} Study {found['hash']}."
    )
