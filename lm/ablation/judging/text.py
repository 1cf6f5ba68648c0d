"""How far a difference depends on the sample of test text: its interval over draws of documents, not of seeds."""

import math
from collections.abc import Sequence

from lm.ablation.study import Study
from lm.generation.documents import DocumentSums
from lm.report.collect import other_rows
from lm.report.statistics import Difference, Sums, t_limit, text_error
from lm.schema import Tree, flatten
from lm.storage.reading import checked
from lm.storage.run_folder import RunFolder
from lm.units import fixed

_OVER = {"test_bits_per_byte": (2, math.log(2)), "test_loss": (1, 1.0)}
"""By metric: index of the sum that a document's nats are divided by (1: tokens, 2: bytes), and a further divisor."""

_ALIKE = 0.01  # by which tokenizers differ in the bytes of tokens that nothing predicts, such as a row's first


def of_text(study: Study, name: str, difference: Difference) -> Tree | None:
    """Returns verdict.json's entry on a difference's dependence on the test text; None where the runs have no sums per document, or not of
    the same documents."""
    if difference.mean is None or study.config.metric not in _OVER:
        return None
    both = [study.ended(which) for which in (study.config.baseline, name)]
    shared = set.intersection(*({job.seed for job in jobs} for jobs in both))
    sides = [[_read(study.run_of(job)) for job in jobs if job.seed in shared] for jobs in both]
    runs = [run for side in sides for run in side if run is not None]
    if len(runs) < 2 * len(shared) or any((run.unit, run.sums.keys()) != (runs[0].unit, runs[0].sums.keys()) for run in runs):
        return None
    baseline, variant = (_sums([run for run in side if run is not None], study.config.metric) for side in sides)
    if (n := sum(size > 0 for _, size in baseline)) < 2 or not any(size > 0 for _, size in variant):
        return None
    return {"unit": runs[0].unit, "number": n, "half": t_limit(difference.level, n) * text_error(baseline, variant)}


def other_texts(study: Study) -> list[str]:
    """Returns a warning where the runs are not all measured on the same held-out text, which zlib's bits per byte of it tell apart, or on
    the same parts of it."""
    parts = other_rows([flatten(config.tree()) for config in study.variants.values()]) or _other_labels(study)
    needed = sorted({fixed(zlib) for run in study.ended_runs() if isinstance(zlib := run.summary().get("zlib_bits_per_byte"), float)})
    if len(needed) < 2:
        return parts
    return [f"Not comparable: the held-out texts differ (zlib level 9 needs {' / '.join(needed)} bits per byte of them).", *parts]


def _other_labels(study: Study) -> list[str]:
    """Returns a warning where the variants' metric is over more or fewer bytes of the test text, as with objectives of other labels."""
    sizes: dict[str, float] = {}
    for name in study.variants:
        found = [sums for run in study.ended_runs(name) if (sums := _read(run)) is not None]
        sizes |= {name: math.fsum(n_bytes for *_, n_bytes in found[0].sums.values())} if found else {}
    if study.config.metric not in _OVER or not sizes or max(sizes.values()) <= (1 + _ALIKE) * min(sizes.values()):
        return []
    told = ", ".join(f"{name}: {n_bytes:,.0f} bytes" for name, n_bytes in sizes.items())
    return [f"Not comparable: the metric is over other text where labels or tokens differ ({told})."]


def sampled(text: Tree | None) -> str:
    """Returns the words on the text's sample that follow the interval over seeds.  text: from `of_text`."""
    return f"; of the sample of {text['number']} {text['unit']} of test text ±{text['half']:.4f}" if text else ""


def covers(found: Tree) -> str:
    """Returns the method section's sentences on what each interval covers."""
    told = next((row["text"] for row in found["variants"].values() if row["text"]), None)
    if told is None:
        return " What another sample of text would change is in none of the intervals."
    rows = ", which has few documents, so that neighbours among them are not independent" if told["unit"] == "rows" else ""
    return (
        " The intervals are over seeds, on this very test text. Behind the sign ± is half of one of the other kind, at the same level: over"
        f" the {told['number']} {told['unit']} of the test text{rows}, with these very runs, by a standard error of the difference of two"
        " ratios of sums that allows for whatever the tokens of one have in common. Neither kind holds the other."
    )


def _read(run: RunFolder) -> DocumentSums | None:
    found = run.test_documents()
    return None if found is None else checked(DocumentSums, found[1], found[0])


def _sums(runs: Sequence[DocumentSums], metric: str) -> Sums:
    """Returns for each document its nats and the divisor of the metric, each summed over all seeds."""
    over, factor = _OVER[metric]
    return [
        (math.fsum(run.sums[number][0] for run in runs), factor * math.fsum(run.sums[number][over] for run in runs))
        for number in runs[0].sums
    ]
