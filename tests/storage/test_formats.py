from pathlib import Path

import pytest

from lm.config import Tree
from lm.errors import CheckpointError
from lm.nn.transformer import model_config
from lm.storage.formats import FORMAT, current
from tests.nn.models import config
from tests.storage.old_formats import as_format_1

WHERE = Path("meta.json")
MODELS = [{}, {"head": {"tied": False, "softcap": 20.0}, "embed": {"scale": 3.0}}]


@pytest.mark.parametrize("options", MODELS, ids=["defaults", "each other than its default"])
def test_a_model_config_of_format_1_means_the_same_model(options: Tree) -> None:
    new = model_config({**config().tree(), **options})
    old = as_format_1({"model": new.tree(), "config": {"model": new.tree(), "seed": 3}, "step": 7})
    assert "tied_head" in old["model"] and "head" not in old["model"]
    found = current(old, WHERE)
    assert (model_config(found["model"]), model_config(found["config"]["model"])) == (new, new)
    assert (found["format"], found["step"], found["config"]["seed"]) == (FORMAT, 7, 3)


def test_a_tree_of_today_is_left_as_it_is() -> None:
    tree = {"format": FORMAT, "model": config().tree(), "parent": None}
    assert current(tree, WHERE) == tree


@pytest.mark.parametrize("found", [FORMAT + 1, 99, 0, -1, 1.0, True, "1", None])
def test_an_unknown_format_is_refused_by_number(found: object) -> None:
    with pytest.raises(CheckpointError, match=rf"meta.json: the format is {found!r}, but this version reads formats 1 to {FORMAT}"):
        current({"format": found}, WHERE)
