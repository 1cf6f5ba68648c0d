"""Whether the runs of a study were made alike, beyond their configs: from the same data, by the same machine and code."""

from lm.ablation.study import Study
from lm.storage.run_folder import RunFolder
from lm.units import shown

_MADE_BY = ("device", "torch", "version", "commit")


def unlike(study: Study) -> list[str]:
    """Returns warnings where the runs of a variant read different data, as after a file was edited between two seeds, and where runs were
    made by different machines or versions."""
    found = {name: [RunFolder(study.folder / job.name).summary() for job in study.ended(name)] for name in study.variants}
    notes = []
    for name, summaries in found.items():
        if len(prints := sorted({shown(each["data_fingerprint"])[:8] for each in summaries if each.get("data_fingerprint")})) > 1:
            notes.append(f"Unfair: {name}: its runs read different data or tokens (fingerprints {', '.join(prints)}).")
    for key in _MADE_BY:
        known = {shown(each[key]) for summaries in found.values() for each in summaries if each.get(key) is not None}
        if len(known) > 1:
            notes.append(f"The runs differ in more than their configs: {key} ({', '.join(sorted(known))}).")
    return notes
