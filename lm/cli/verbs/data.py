"""`lm data show data=...`: the rows that a training would read, so that what a model learns from can be looked at."""

from typing import Literal

from pydantic import Field

from lm.cli.compose.sections import take_rows
from lm.cli.verb import Verb
from lm.errors import ConfigError
from lm.printing import answer, answer_spans, note
from lm.spelling import did_you_mean


class Data(Verb):
    """usage: lm data show [key=value ...] [overrides of lm train]

    Prints rows as the model gets them: of each document in a row what is read, token by token, and what is to be said at each place
    ('·': nothing). A bar stands between tokens, and on a terminal every other one has another colour.
    """

    words = ("show",)
    takes = None

    rows: list[int] = Field([0, 1, 2], min_length=1)
    """Which rows, as in rows=0,5,9."""
    split: Literal["train", "val", "test"] = "train"
    """The part of the data that they are of."""
    draw: int = Field(0, ge=0)
    """The step whose masks or cuts are shown, where they are random."""

    def run(self, rest: list[str]) -> None:
        """Prints rows on stdout, progress on stderr."""
        if rest[:1] != ["show"]:
            given = rest[0] if rest else ""
            raise ConfigError(f"data: '{given}' is nothing to do with data. {did_you_mean(given, ['show'])}")
        corpus = take_rows(rest[1:])
        model = corpus.reader()
        if self.split == "test" and not corpus.data.test_frac:
            raise ConfigError("split=test: nothing is set aside for it. Raise data.test_frac.")
        try:
            corpus.objective.require_fit(corpus.objective.models[0] if model is None else model.kind, corpus.data)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        import numpy as np

        from lm.cli.views.rows import shown
        from lm.data.rows.build import build_splits
        from lm.data.store.prepare import prepare

        prepared = prepare(corpus.data, corpus.tokenizer, log=note, specials=corpus.objective.specials())
        splits = build_splits(corpus.objective, corpus.data, prepared, model, corpus.drawn_by)
        rows = {"train": splits.train, "val": splits.val, "test": splits.test}[self.split]
        assert rows is not None
        for line in rows.describe().splitlines():
            note(line)
        wanted = self.rows if "rows" in self.model_fields_set else [row for row in self.rows if row < len(rows)]
        if outside := [row for row in wanted if not 0 <= row < len(rows)]:
            raise ConfigError(f"rows: {outside[0]} was asked for, and there are {len(rows):,}. Choose rows from 0 to {len(rows) - 1}.")
        for row in wanted:
            answer(", ".join(filter(None, [f"row {row} of {len(rows):,}", rows.remark(row)])))
            for spans in shown(rows.batch(np.array([row]), self.draw), prepared.tokenizer, rows.label_names()):
                answer_spans(*spans)
