"""`lm data show data=...`: the rows that a training would read, so that what a model learns from can be looked at."""

import sys
from collections.abc import Sequence

from lm.cli.compose.arguments import take
from lm.cli.compose.sections import Corpus, take_corpus
from lm.cli.views.text import say
from lm.errors import ConfigError
from lm.schema import did_you_mean

_USAGE = """\
usage: lm data show [rows=0,1,2] [split=train|val] [draw=0] [overrides of lm train]

Prints rows as the model gets them: of each document in a row what is read, token by token, and what is to be said at each place ('·':
nothing). A terminal shows every other token in another colour, elsewhere a bar stands between them. draw: the step whose masks or cuts
are shown, where they are random.
"""


def run(args: Sequence[str]) -> int:
    """Rows on stdout, progress on stderr."""
    if not args or args[0] != "show":
        given = args[0] if args else ""
        raise ConfigError(f"data: '{given}' is nothing to do with data. {did_you_mean(given, ['show'])}")
    wanted, rest = take(args[1:], "rows")
    split, rest = take(rest, "split")
    draw, rest = take(rest, "draw")
    if split not in (None, "train", "val"):
        raise ConfigError(f"split: {split!r} is not an option. {did_you_mean(str(split), ['train', 'val'])}")
    _show(take_corpus("data show", rest), _numbers("rows", wanted or "0,1,2"), split == "val", _numbers("draw", draw or "0")[0])
    return 0


def help_text(args: Sequence[str]) -> str:
    """Usage."""
    return _USAGE


def _numbers(key: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{key}: {text!r} are no numbers from 0. Write {key}=0 or {key}=0,5,9.")
    return [int(part) for part in parts]


def _show(corpus: Corpus, wanted: list[int], of_val: bool, draw: int) -> None:
    import numpy as np

    from lm.cli.views.rows import shown
    from lm.data.rows.build import build_splits
    from lm.data.store.prepare import prepare

    prepared = prepare(corpus.data, corpus.tokenizer, log=say, specials=corpus.objective.specials())
    splits = build_splits(corpus.objective, corpus.data, prepared, None, seed=0)
    rows = splits.val if of_val else splits.train
    for line in rows.describe().splitlines():
        say(line)
    if too_high := [row for row in wanted if row >= len(rows)]:
        raise ConfigError(f"rows: {too_high[0]} was asked for, and there are {len(rows):,}. Choose rows up to {len(rows) - 1}.")
    for row in wanted:
        print(f"row {row} of {len(rows):,}")
        print(shown(rows.batch(np.array([row]), draw), prepared.tokenizer, sys.stdout.isatty()))
