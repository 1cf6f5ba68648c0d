"""Runs side by side: grouped over seeds, best first, with what makes the comparison unfair."""

import json
import os.path
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lm.errors import CheckpointError, ConfigError
from lm.report.run import Axis, Run, read_run, run_folders
from lm.report.statistics import ALPHA, Difference, differences
from lm.schema import Tree, flatten
from lm.spelling import did_you_mean
from lm.units import ABSENT, fixed, shown, si

_METRICS = {"val_reward": "val reward", "val_bits_per_byte": "val bits/byte", "val_loss": "val loss"}
"""What runs are compared by, the first that all tell."""
TOLD = {"val accuracy": "val_accuracy", "val macro F1": "val_macro_f1", "val Pearson": "val_pearson"}
"""Columns that are there where all runs tell them."""
# Keys that are no difference between two variants.
_INERT = (
    "seed", "run.", "logger.", "resume.", "checkpoint.", "traceback", "data.cache_dir", "data.remote", "trainer.sample_",
    "trainer.deterministic", "trainer.profile",
)  # fmt: skip
# Nor are these: a run is the same with any of them. Apart, since a ledger's hashes are of what `compared` gives.
_HOW = ("trainer.log_every", "data.workers", "data.verify", "check", "plan", "budget")
# Decide what val_loss is of.
_LEARNED = tuple(f"objective.{key}" for key in ("kind", "among", "temperature", "both_ways", "first_dims"))
# Decide what val_reward is of.
_REWARDED = ("objective.reward", "objective.environment", "objective.max_tokens")
# Data keys that shape the batches and leave the text alone.
_BATCHING = ("data.seq_len", "data.global_batch", "data.ramp", "data.mask_documents", "data.workers")


@dataclass(frozen=True)
class Row:
    """Runs whose configs differ in nothing but the seed."""

    runs: list[Run]
    values: Tree

    @cached_property
    def name(self) -> str:
        more = len(self.runs) - 1
        lost, left = any(run.diverged for run in self.runs), not all(run.finished for run in self.runs)
        mark = " (diverged)" if lost else " (unfinished)" if left else ""
        return self.runs[0].name + (f" +{more}" if more else "") + mark

    @property
    def seeds(self) -> list[str]:
        """The seed of each run as text: '1', or '1/0/0' where initial weights, data and dropout have seeds of their own."""
        return [_seed(run) for run in self.runs]

    def by_seed(self, key: str) -> dict[str, float]:
        """Returns the known values of a metric by seed; a seed comes once in a row."""
        numbers = {seed: run.number(key) for seed, run in zip(self.seeds, self.runs, strict=True)}
        return {seed: number for seed, number in numbers.items() if number is not None}

    def mean(self, key: str) -> float | None:
        known = self.by_seed(key).values()
        return statistics.fmean(known) if len(known) == len(self.runs) else None

    def error(self, key: str) -> float | None:
        """Returns the standard error of the mean over seeds; None for a single run."""
        known = self.by_seed(key).values()
        return statistics.stdev(known) / len(known) ** 0.5 if len(known) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs: `rows`, the best by `metric` first; `keys`: config keys that differ between rows, but for options that only
    some have and none uses; `notes`: what makes it unfair.

    baseline: the row that the others are compared with.  x: what the curves are drawn against, for which alone the runs are read.
    """

    metric: str
    x: Axis
    keys: list[str]
    rows: list[Row]
    baseline: Row
    notes: list[str]

    @property
    def title(self) -> str:
        return _METRICS[self.metric]

    @property
    def told(self) -> dict[str, str]:
        """The metrics of `TOLD` that all runs tell: how often they are right, in answers, pairs or labels."""
        return {name: key for name, key in TOLD.items() if all(run.number(key) is not None for row in self.rows for run in row.runs)}

    @property
    def repeated(self) -> bool:
        """Whether some row has several seeds."""
        return any(len(row.runs) > 1 for row in self.rows)

    def changes(self, row: Row) -> list[str]:
        return [shown(row.values.get(key, ABSENT)) for key in self.keys]

    def comparable(self, row: Row) -> bool:
        """Whether a row was validated on the same text as the baseline, as far as is known."""
        mine, theirs = texts(row.runs), texts(self.baseline.runs)
        return not mine or not theirs or mine == theirs

    def difference(self, row: Row) -> str:
        """Returns `measured` as text, with `*` where the interval excludes 0."""
        mean, low, high, p = self.measured(row).values()
        if mean is None:
            return "baseline" if row is self.baseline else "-"
        if low is None or high is None or p is None:
            return f"{mean:+.4f}"
        return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]" + (" *" if p < ALPHA else "")

    def measured(self, row: Row) -> dict[str, float | None]:
        """Returns a row's difference to the baseline over the seeds that both have, the ends of its interval, and p by Holm; where there is
        no interval, the difference of the means alone. None of the baseline itself, and where nothing can be compared."""
        mine, theirs, found = row.mean(self.metric), self.baseline.mean(self.metric), self._differences.get(row.name)
        away, low, high, p = None, None, None, None
        if row is not self.baseline and mine is not None and theirs is not None and found is not None and self.comparable(row):
            away = mine - theirs
            if found.interval is not None and found.mean is not None and found.p is not None:
                away, (low, high), p = found.mean, found.interval, found.p
        return {"difference": away, "difference_low": low, "difference_high": high, "p_holm": p}

    @cached_property
    def _differences(self) -> dict[str, Difference]:
        known = {row.name: row.by_seed(self.metric) for row in self.rows}
        return differences(known.pop(self.baseline.name), known)


def compared(config: Tree) -> Tree:
    """Returns a config's values by dotted key, without seed, run and what else is no difference between two variants."""
    return {key: value for key, value in flatten(config).items() if not key.startswith(_INERT)}


def texts(runs: Iterable[Run]) -> set[float]:
    """Returns zlib's bits per byte of the validation texts of these runs, which tell texts apart, as far as they are known."""
    return {zlib for run in runs if (zlib := run.number("zlib_bits_per_byte")) is not None}


def differing(flat_trees: Sequence[Tree]) -> list[str]:
    """Returns the dotted keys, in the order first met, whose values (or presence) differ between the trees."""
    keys = dict.fromkeys(key for flat in flat_trees for key in flat)
    return [key for key in keys if any(flat.get(key, ABSENT) != flat_trees[0].get(key, ABSENT) for flat in flat_trees)]


def collect(folders: list[Path], baseline: str | None = None, x: Axis = "tokens", as_of_today: Callable[[Tree], Tree] = dict) -> Comparison:
    """Returns the comparison of the runs that can be read; the notes name the others. A folder given twice counts once.

    baseline: a run's folder or name; None: the first run. x: what the curves are drawn against. as_of_today: as of `compare`. If no run can
    be read, raises the ConfigError or CheckpointError of the first.
    """
    if not folders:
        raise ConfigError("compare: no run folder was given, and one at least is needed. Name some: lm compare runs/a runs/b.")
    found = [run for folder in folders for run in run_folders(folder)]
    runs, refused = [], []
    for folder in {os.path.realpath(folder): folder for folder in found or folders}.values():
        try:
            runs.append(read_run(folder).thinned(x))
        except (ConfigError, CheckpointError) as error:
            refused.append(error)
    if not runs:
        raise refused[0]
    names = Counter(run.name for run in runs)
    runs = [replace(run, name=str(run.folder)) if names[run.name] > 1 else run for run in runs]
    validated = [run for run in runs if run.number("val_loss") is not None] or runs
    metric = next((key for key in _METRICS if all(run.number(key) is not None for run in validated)), "val_loss")
    sign = -1 if metric == "val_reward" else 1
    rows = sorted(_group(runs, as_of_today), key=lambda row: (row.mean(metric) is None, sign * (row.mean(metric) or 0.0)))
    keys = differing([row.values for row in rows])
    first = runs[0] if baseline is None else _named(runs, baseline)
    against = next(row for row in rows if first in row.runs)
    notes = [*(f"Left out: {error}" for error in refused), *_notes(runs, keys, metric)]
    return Comparison(metric, x, [key for key in keys if not _off([row.values.get(key, ABSENT) for row in rows])], rows, against, notes)


def _off(values: Sequence[Any]) -> bool:
    """Whether an option is off wherever it exists, and only its absence differs, which the kind of its section tells already."""
    there = [value for value in values if value is not ABSENT]
    off = there[0] is False or there[0] in (None, [], {})
    return off and len(there) < len(values) and all(value == there[0] for value in there)


def _named(runs: Sequence[Run], baseline: str) -> Run:
    for run in runs:
        if baseline == run.name or os.path.realpath(baseline) == os.path.realpath(run.folder):
            return run
    raise ConfigError(
        f"baseline={baseline}: it is none of the runs that are compared. {did_you_mean(baseline, [run.name for run in runs])}"
    )


def _seed(run: Run) -> str:
    seed = run.config.get("seed", 0)
    return "/".join(map(str, seed.values())) if isinstance(seed, dict) else str(seed)


def _group(runs: list[Run], as_of_today: Callable[[Tree], Tree]) -> list[Row]:
    """Groups runs over seeds into rows. A seed that comes twice under one config starts another row: repeating a run is no new evidence."""
    repeats: Counter[str] = Counter()
    rows: dict[tuple[str, int], Row] = {}
    for run in runs:
        values = {key: value for key, value in compared(as_of_today(run.config)).items() if not key.startswith(_HOW)}
        config, seed = json.dumps(values, sort_keys=True), _seed(run)
        rows.setdefault((config, repeats[config + seed]), Row([], values)).runs.append(run)
        repeats[config + seed] += 1
    return list(rows.values())


def _notes(runs: list[Run], keys: list[str], metric: str) -> list[str]:
    notes = []
    if diverged := [run.name for run in runs if run.diverged]:
        notes.append(f"Diverged, so its newest figures before that are shown: {', '.join(diverged)}.")
    if unfinished := [run.name for run in runs if not run.finished and not run.diverged]:
        notes.append(f"Unfinished, so its newest figures are shown: {', '.join(unfinished)}.")
    if len(zlib := texts(runs)) > 1:
        needed = " / ".join(sorted(map(fixed, zlib)))
        notes.append(f"Not comparable: the validation texts differ (zlib level 9 needs {needed} bits per byte of them).")
    configs = [flatten(run.config) for run in runs]
    if len(prints := _distinct(runs, "data_fingerprint")) == 1 and all(run.summary.get("data_fingerprint") for run in runs):
        keys = [key for key in keys if not key.startswith("tokenizer.")]  # as init_from names it, the tokenizer of its checkpoint
        configs = [{key: value for key, value in flat.items() if not key.startswith("tokenizer.")} for flat in configs]
    if len(prints) > 1:
        notes.append(f"Unfair: the runs read different data or tokens (fingerprints {', '.join(each[:8] for each in prints)}).")
    elif sources := [key for key in keys if key.startswith("data.") and key not in _BATCHING]:
        notes.append(f"Unfair: the runs read different data ({', '.join(sources)}).")
    if len(tokens := {run.number("tokens") or 0 for run in runs}) > 1:
        notes.append(f"Unfair: the runs saw different numbers of tokens ({', '.join(si(count) for count in sorted(tokens))}).")
    bits = any(run.number("val_bits_per_byte") is not None for run in runs)  # else labels are no text
    if metric == "val_loss" and not {*keys}.isdisjoint(_LEARNED):
        notes.append("Not comparable: the objectives differ, and the loss is of what each of them learns.")
    if metric == "val_reward" and (others := [key for key in keys if key.startswith(_REWARDED)]):
        notes.append(f"Not comparable: what is rewarded differs ({', '.join(others)}).")
    if metric == "val_loss" and bits and any(key.startswith("tokenizer.") for key in keys):
        notes.append("Not comparable: the tokenizers differ, and the loss per token depends on the tokenizer.")
    notes += other_rows(configs)
    for key in ("device", "torch"):
        if len(values := _distinct(runs, key)) > 1:
            notes.append(f"Speeds are not comparable: {key} differs ({', '.join(values)}).")
    return notes


def other_rows(configs: Sequence[Tree]) -> list[str]:
    """Returns a note where runs of these configs, given flat, read as many rows of held-out text, but rows of other text."""
    if all(flat.get("data.val_rows") is None for flat in configs):
        return []
    cut = [key for key in differing(configs) if key in ("data.seq_len", "data.val_rows") or key.startswith("tokenizer.")]
    names = ", ".join(dict.fromkeys(key if key.startswith("data.") else "tokenizer" for key in cut))
    rule = "data.val_rows rows of the held-out text are other parts of it where these differ"
    return [f"Not comparable: {rule}: {names}. Say data.val_rows=null, which reads all of it."] if names else []


def _distinct(runs: list[Run], key: str) -> list[str]:
    return sorted({shown(run.summary[key]) for run in runs if run.summary.get(key) is not None})
