"""JSON of ours, and of others."""

from pathlib import Path

import pytest

from lm.errors import CheckpointError
from lm.storage.reading import read_json


def test_what_others_write_may_mean_no_limit(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_max_length": 1000000000000000019884624838656, "time_step_limit": [0.0, Infinity], "n": 7}')
    with pytest.raises(CheckpointError, match="beyond 64 bits"):
        read_json(file)
    assert read_json(file, foreign=True) == {"model_max_length": 1e30, "time_step_limit": [0.0, float("inf")], "n": 7}
    file.write_text('{"n": NaN}')
    with pytest.raises(CheckpointError, match="NaN is no number"):
        read_json(file, foreign=True)
