"""JSON of ours, and of others."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lm.errors import CheckpointError
from lm.storage.reading import parse_asked, parse_json, read_json


def test_what_others_write_may_mean_no_limit(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_max_length": 1000000000000000019884624838656, "time_step_limit": [0.0, Infinity], "n": 7}')
    with pytest.raises(CheckpointError, match="beyond 64 bits"):
        read_json(file)
    assert read_json(file, foreign=True) == {"model_max_length": 1e30, "time_step_limit": [0.0, float("inf")], "n": 7}
    file.write_text('{"n": NaN}')
    with pytest.raises(CheckpointError, match="NaN is no number"):
        read_json(file, foreign=True)


@pytest.mark.parametrize(("read", "deep"), [(parse_json, 800), (partial(parse_json, foreign=True), 800), (parse_asked, 140)])
def test_what_is_nested_deeply_is_refused_whatever_python_parses(read: Callable[[bytes], object], deep: int) -> None:
    """Seen to fail under Python 3.13, which parses thousands of levels, so that what reads them later overflows."""
    assert read(b"[" * deep + b"]" * deep) is not None and read(b"[" + b"{}," * 2000 + b"{}]") == [{}] * 2001
    for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
        with pytest.raises(ValueError, match="it is nested too deeply"):
            read(opened * 5000 + b"1" + closed * 5000)
