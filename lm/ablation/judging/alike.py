"""Whether the runs of a study were made alike, beyond their configs: from the same data and weights, by the same machine and code."""

import os

from lm.ablation.study import Study
from lm.schema import Slot, flatten
from lm.storage.reading import read_json
from lm.storage.run_folder import RunFolder
from lm.units import shown

_MADE_BY = ("device", "torch", "version", "commit")


def unlike(study: Study) -> list[str]:
    """Returns warnings where the runs of a variant read different data or began from different weights, as after a file or init_from was
    made anew between two seeds, and where runs were made by different machines or versions."""
    notes = []
    for name in study.variants:
        runs = study.ended_runs(name)
        summaries = [run.summary() for run in runs]
        if len(prints := sorted({shown(each["data_fingerprint"])[:8] for each in summaries if each.get("data_fingerprint")})) > 1:
            notes.append(f"Unfair: {name}: its runs read different data or tokens (fingerprints {', '.join(prints)}).")
        if len({_parent(run) for run in runs} - {None}) > 1:
            notes.append(f"Unfair: {name}: its runs began from different weights, as the model of init_from was made anew in between.")
        if len({each["teacher_hash"] for each in summaries if each.get("teacher_hash")}) > 1:
            notes.append(
                f"Unfair: {name}: its teacher or reward model was made anew between its runs, so that they learned from different ones."
            )
    for key, known in made_by(study).items():
        if len(known) > 1:
            notes.append(f"The runs differ in more than their configs: {key} ({', '.join(known)}).")
    return notes


def lacking(study: Study) -> list[str]:
    """Returns a warning where the baseline's model has options, at other values than their defaults, that a variant's kinds do not have:
    the two differ in these beside what was asked."""
    base = study.config.baseline
    slots = {slot: part.model_dump(exclude_defaults=True) for slot, part in study.variants[base].model if isinstance(part, Slot)}
    chosen = flatten({slot: values for slot, values in slots.items() if values})
    notes = []
    for name, cfg in study.variants.items():
        if lost := [f"model.{key}={shown(value)}" for key, value in chosen.items() if key not in flatten(cfg.model.tree())]:
            notes.append(f"{name}: it has no {', '.join(lost)}, as {base} has, so that the two differ in more than was asked.")
    return notes


def made_by(study: Study) -> dict[str, list[str]]:
    """Returns the devices, and the versions of torch and of `lm`, of the compared runs that have ended."""
    summaries = [run.summary() for run in study.ended_runs()]
    return {key: sorted({shown(each[key]) for each in summaries if each.get(key) is not None}) for key in _MADE_BY}


def _parent(run: RunFolder) -> str | None:
    """Returns the hash of the model that a run began from; None where it began from none, or has no model."""
    config = run.model / "config.json"
    found = read_json(config) if os.path.lexists(config) else None
    return str(found["parent_hash"]) if isinstance(found, dict) and found.get("parent_hash") else None
