from pathlib import Path

import pytest

from lm import plugins
from lm.errors import CheckpointError, ConfigError
from lm.plugins import Plugin
from lm.schema import Tree
from lm.storage.formats import FORMAT, current, with_todays_keys

WHERE = Path("meta.json")


def test_a_tree_of_today_is_left_as_it_is() -> None:
    tree = {"format": FORMAT, "model": {"kind": "decoder"}, "parent": None}
    assert current(tree, WHERE) == tree


@pytest.mark.parametrize("found", [FORMAT + 1, FORMAT - 1, 0, float(FORMAT), True, str(FORMAT), None])
def test_another_format_is_refused_by_number(found: object) -> None:
    with pytest.raises(CheckpointError, match=rf"meta.json: the format is {found!r}, but this version reads format {FORMAT}\."):
        current({"format": found}, WHERE)


@pytest.mark.parametrize(
    ("every", "now"), [(2, {"recompute": "block", "recompute_every": 2}), (None, {"recompute": "none", "recompute_every": 1})]
)
def test_keys_of_older_configs_are_read_as_those_of_today(every: int | None, now: Tree) -> None:
    old: Tree = {"seed": 0, "trainer": {"max_steps": 3, "checkpoint_blocks": every}, "checkpoint_blocks": 4}
    new: Tree = {"seed": 0, "trainer": {"max_steps": 3, **now}, "checkpoint_blocks": 4}
    assert with_todays_keys(old) == with_todays_keys(new) == new
    assert with_todays_keys({"configs": {"a": old}}) == {"configs": {"a": new}}
    assert current({"format": FORMAT, "config": old}, WHERE)["config"] == new
    assert old["trainer"] == {"max_steps": 3, "checkpoint_blocks": every}


def test_hashes_of_plugins_with_their_comments_are_read_as_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_loaded", {"mine": Plugin("mine", "mine.py", "lm_plugins.mine", sha256="bare", whole="whole")})
    old, new = ({"seed": 0, "plugins": {"mine": sha256, "other": "whole"}} for sha256 in ("whole", "bare"))
    assert with_todays_keys({"study": {}, "configs": {"a": old}}) == {"study": {}, "configs": {"a": new}}
    assert current({"format": FORMAT, "plugins": {"mine": "whole"}}, WHERE)["plugins"] == {"mine": "bare"}
    with pytest.raises(ConfigError, match="SHA-256 another"):
        current({"format": FORMAT, "plugins": {"mine": "another"}}, WHERE)
