from fractions import Fraction

import pytest

from lm.data.kinds import TextConfig
from lm.data.sizes import Sizes
from lm.errors import ConfigError
from lm.schema import from_tree


def test_places_follow_each_other_over_all_phases() -> None:
    sizes = Sizes(8, ((3, 2), (5, 4)))
    assert [len(sizes.places(step)) for step in range(8)] == [2, 2, 2, 4, 4, 8, 8, 8]
    assert [place for step in range(8) for place in sizes.places(step)] == list(range(38))
    assert [sizes.before(step) for step in (0, 1, 3, 4, 5, 7)] == [0, 2, 6, 10, 14, 30]


def test_so_many_rows_are_read_by_the_fewest_steps() -> None:
    for sizes in (Sizes(8), Sizes(8, ((3, 2), (5, 4)))):
        for rows in (Fraction(n, 3) for n in range(120)):
            steps = sizes.until(rows)
            assert sizes.before(steps) >= rows and (steps == 0 or sizes.before(steps - 1) < rows)


def test_what_is_counted_of_each_step_keeps_the_phases() -> None:
    halves = Sizes(8, ((3, 2), (5, 4))).each(lambda rows: rows // 2)
    assert [halves.of(step) for step in range(7)] == [1, 1, 1, 2, 2, 4, 4] and halves.before(6) == 11


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ([(5, 2), (5, 4)], "ramp: until_step is 5, 5, and must rise from phase to phase. Sort them."),
        ([(5, 4), (9, 2)], "ramp: global_batch is 4, 2, and must rise, up to the 8 rows behind it. Change one."),
        ([(5, 8)], "ramp: global_batch is 8, and must rise, up to the 8 rows behind it. Change one."),
    ],
)
def test_batches_that_do_not_grow_are_refused(ramp: list[tuple[int, int]], message: str) -> None:
    phases = [{"until_step": step, "global_batch": rows} for step, rows in ramp]
    with pytest.raises(ConfigError) as caught:
        from_tree(TextConfig, {"kind": "text", "files": "x", "global_batch": 8, "ramp": phases})
    assert str(caught.value).endswith(message)
