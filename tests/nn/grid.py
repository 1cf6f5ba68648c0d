"""Which slot values meet in the tests: a covering design instead of the full product, which has hundreds of thousands of models.

For each kind of stack, every pair of values of two slots that may meet does meet, and further draws are those with the most new triples.
A few of them, `pairwise`, hold every pair at least once in some kind of stack, and every value in each.
"""

import heapq
import itertools
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from lm.errors import ConfigError
from lm.nn.model_config import model_config
from lm.schema import Tree
from lm.testing.models import BASE
from tests.nn.models import ATTENTIONS, BLOCKS, EMBEDS, FFNS, HEADS, MIXING, NORMS, POSITIONS, RESIDUALS, with_kinds

SLOTS: dict[str, list[dict[str, Any]]] = {
    "norm": NORMS,
    "position": POSITIONS,
    "attention": ATTENTIONS,
    "ffn": FFNS,
    "block": BLOCKS,
    "residual": RESIDUALS,
    "head": HEADS,
    "embed": EMBEDS,
    "mixing": MIXING,
}
NAMES = list(SLOTS)
COMBINATIONS = {"decoder": 1350, "encoder": 710, "encoder_decoder": 720}
PAIRWISE = 670  # of them, so many hold every pair; counting them takes seconds, which every worker would spend before its first test
PART = 20  # combinations of one test
PARTS = range(0, PAIRWISE, PART)
CANDIDATES = 6  # draws of which the one with the most new triples is taken

Choice = tuple[int, ...]  # of each slot, the number of its value
Part = tuple[tuple[int, int], ...]  # some slots, each with the number of its value


def tree_of(kind: str, part: Part) -> Tree:
    """A model with these slot values, the rest as in BASE. What comes with a mixing takes the place of others."""
    chosen = {NAMES[slot]: SLOTS[NAMES[slot]][value] for slot, value in part}
    mixing = chosen.pop("mixing", {})
    return with_kinds(BASE | {"kind": kind} | chosen | mixing)


@cache
def refused(kind: str) -> frozenset[Part]:
    """Values that no model of this kind takes, and pairs of others that may not meet, by asking the config."""
    found: set[Part] = set()
    singles = [((slot, value),) for slot, name in enumerate(NAMES) for value in range(len(SLOTS[name]))]
    pairs = [(a, b) for (a,), (b,) in itertools.combinations(singles, 2) if a[0] != b[0]]
    for part in [*singles, *pairs]:
        if not any((one,) in found for one in part) and not _accepted(kind, part):
            found.add(part)
    return frozenset(found)


def _accepted(kind: str, part: Part) -> bool:
    chosen = {NAMES[slot]: value for slot, value in part}
    if any(chosen.get(slot, 0) for slot in MIXING[chosen.get("mixing", 0)]):  # which would not be tried: the mixing has its own
        return False
    try:
        model_config(tree_of(kind, part))
    except ConfigError:
        return False
    return True


def parts(choice: Choice, size: int) -> list[Part]:
    return list(itertools.combinations(enumerate(choice), size))


def may_meet(kind: str, part: Part) -> bool:
    """Whether it holds nothing that is refused."""
    return not any(smaller in refused(kind) for size in (1, 2) for smaller in itertools.combinations(part, size))


@cache
def covering(kind: str) -> list[Choice]:
    """COMBINATIONS[kind] different choices, the same on every machine."""
    source = random.Random(kind)
    chosen: list[Choice] = []
    triples: set[Part] = set()
    values = [[(slot, value) for value in range(len(SLOTS[name]))] for slot, name in enumerate(NAMES)]
    missing = {pair for a, b in itertools.combinations(values, 2) for pair in itertools.product(a, b) if may_meet(kind, pair)}
    while len(chosen) < COMBINATIONS[kind]:
        start = min(missing) if missing else ()
        drawn = [choice for _ in range(CANDIDATES) if (choice := _drawn(kind, start, source)) not in chosen]
        if drawn:
            best = max(drawn, key=lambda choice: len(set(parts(choice, 3)) - triples))
            chosen.append(best)
            triples.update(parts(best, 3))
            missing.difference_update(parts(best, 2))
    assert not missing, f"{kind}: {len(missing)} pairs of slot values do not meet"
    return chosen


def _drawn(kind: str, start: Part, source: random.Random) -> Choice:
    """A random choice that holds `start` and nothing that is refused."""
    while True:
        choice = [source.randrange(len(SLOTS[name])) for name in NAMES]
        for slot, value in start:
            choice[slot] = value
        if may_meet(kind, tuple(enumerate(choice))):
            return tuple(choice)


@cache
def pairwise() -> list[tuple[str, Choice]]:
    """Those with the most new pairs, until there are no new ones; a kind of stack and a value are a pair too."""
    everything = [(kind, choice) for kind in COMBINATIONS for choice in covering(kind)]
    pairs = [{*parts(choice, 2), *((kind, part) for part in parts(choice, 1))} for kind, choice in everything]
    missing, chosen = set[object]().union(*pairs), []
    queue = [(-len(found), i) for i, found in enumerate(pairs)]
    heapq.heapify(queue)
    while missing:
        promised, i = heapq.heappop(queue)
        if (new := len(pairs[i] & missing)) < -promised:
            heapq.heappush(queue, (-new, i))
        else:
            chosen.append(everything[i])
            missing -= pairs[i]
    return chosen


def others() -> list[tuple[str, Choice]]:
    """What is left of the designs."""
    return [(kind, choice) for kind in COMBINATIONS for choice in covering(kind) if (kind, choice) not in set(pairwise())]


def trees(start: int, models: list[tuple[str, Choice]] | None = None) -> Iterator[Tree]:
    """Those of one test. models: of which it has some; None: `pairwise`."""
    for kind, choice in (pairwise() if models is None else models)[start : start + PART]:
        yield tree_of(kind, tuple(enumerate(choice)))


def some(kind: str, n: int) -> Iterator[Tree]:
    """n random models of this kind. Unlike a design, they take no table of what may not meet, which takes seconds."""
    source, found = random.Random(kind), 0
    while found < n:
        part = tuple((slot, source.randrange(len(SLOTS[name]))) for slot, name in enumerate(NAMES))
        if _accepted(kind, part):
            found += 1
            yield tree_of(kind, part)


def decoding(start: int) -> Iterator[Tree]:
    """Those that go on with texts."""
    return (tree for tree in trees(start) if tree["kind"] != "encoder")
