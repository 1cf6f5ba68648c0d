"""A record of the questions and answers of all studies of a folder, to notice a pair of configs that is compared again."""

import json
import logging
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from lm.ablation.study import Study
from lm.data.sources.fingerprint import short_hash
from lm.errors import CheckpointError, ConfigError, LmError, ResourceError
from lm.report.collect import compared
from lm.report.statistics import Verdict
from lm.schema import Config, Tree, from_tree
from lm.storage.atomic import disk_errors
from lm.storage.reading import never_waiting, parse_json, read_bytes
from lm.training.config import TrainConfig

log = logging.getLogger("lm")


class Answer(Config):
    """Of one variant."""

    overrides: list[str]
    config: str
    """Hash of the resolved config, but for what is no difference between two variants."""
    pairs: int
    """Seeds that the verdict rests on."""
    verdict: Verdict | None
    """null of the baseline, and of fewer than two pairs."""


class Entry(Config):
    """A line: what a study said when it had something new to say."""

    date: str
    study: str
    hash: str
    metric: str
    baseline: str
    overrides: list[str]
    """Those of every variant."""
    variants: dict[str, Answer]


class Ledger:
    """`runs/studies.jsonl` beside the folder `runs/studies`: a JSON object a line, in the order of time."""

    def __init__(self, studies: Path) -> None:
        absolute = Path(os.path.abspath(studies))
        self.path = absolute.with_name(f"{absolute.name}.jsonl")

    def entries(self) -> list[Entry]:
        """Returns the ledger's entries; a line cut off by a kill is left out. None, with a warning, where it cannot be read."""
        found = []
        try:
            lines = read_bytes(self.path).split(b"\n") if os.path.lexists(self.path) else []
        except CheckpointError as error:
            _without(error)
            lines = []
        for line in lines:
            with suppress(ValueError, ConfigError):
                tree = parse_json(line)
                found.append(from_tree(Entry, tree if isinstance(tree, dict) else {}))
        return found

    def note(self, study: Study, found: Tree) -> None:
        """Appends a study's present findings, unless its last entry says the same. Where it cannot, as another user's ledger, a warning is
        all: the study stands without.  found: content of verdict.json."""
        entry = _entry(study, found)
        before = [entry.replace(date=old.date) == old for old in self.entries() if (old.study, old.hash) == (entry.study, entry.hash)]
        if any(answer.verdict for answer in entry.variants.values()) and not (before and before[-1]):
            try:
                self._append(json.dumps(entry.tree(), ensure_ascii=False))
            except (CheckpointError, ResourceError) as error:
                _without(error)

    def asked_before(self, study: Study) -> list[str]:
        """Returns one sentence for each pair of configs that other studies have compared, with the newest finding."""
        hashes, base = {name: _hash(config) for name, config in study.variants.items()}, study.config.baseline
        pairs = {frozenset((each, hashes[base])): name for name, each in hashes.items()}
        told = {}
        for entry in self.entries():
            if (entry.study, entry.hash) == (study.folder.name, study.hash) or entry.baseline not in entry.variants:
                continue
            for name, answer in entry.variants.items():
                mine = pairs.get(frozenset((answer.config, entry.variants[entry.baseline].config)))
                if mine is not None and answer.verdict is not None:
                    said = f"{name} against {entry.baseline}: {answer.verdict}, {answer.pairs} pairs of {entry.metric}, {entry.date[:10]}"
                    told[mine] = f"{mine} against {base} was asked in study {entry.study} already: {said}"
        return list(told.values())

    def _append(self, line: str) -> None:
        """Appends a line in a single write, so that another study's append does not mix with it; begins a new line after a torn one."""
        with disk_errors(self.path):
            torn = os.path.lexists(self.path) and not read_bytes(self.path).endswith(b"\n")
            with open(self.path, "ab", buffering=0, opener=never_waiting) as file:
                file.write(("\n" * torn + line + "\n").encode(errors="backslashreplace"))


def _without(error: LmError) -> None:
    log.warning("%s No verdict depends on this ledger of all studies.", error)


def _entry(study: Study, found: Tree) -> Entry:
    answers = {}
    for name, config in study.variants.items():
        told = found["variants"][name]["difference"] or {"pairs": []}
        n = len(told["pairs"])
        own = study.config.variants[name]
        answers[name] = Answer(overrides=own, config=_hash(config), pairs=n, verdict=told["verdict"] if n > 1 else None)
    keys = ("study", "hash", "metric", "baseline")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Entry(**{key: found[key] for key in keys}, date=date, overrides=study.config.overrides, variants=answers)


def _hash(config: TrainConfig) -> str:
    return short_hash(compared(config.tree()))
