from pathlib import Path

import pytest

from lm.errors import CheckpointError
from lm.storage.formats import FORMAT, current

WHERE = Path("meta.json")


def test_a_tree_of_today_is_left_as_it_is() -> None:
    tree = {"format": FORMAT, "model": {"kind": "decoder"}, "parent": None}
    assert current(tree, WHERE) is tree


@pytest.mark.parametrize("found", [FORMAT + 1, FORMAT - 1, 0, float(FORMAT), True, str(FORMAT), None])
def test_another_format_is_refused_by_number(found: object) -> None:
    with pytest.raises(CheckpointError, match=rf"meta.json: the format is {found!r}, but this version reads format {FORMAT}\."):
        current({"format": found}, WHERE)
