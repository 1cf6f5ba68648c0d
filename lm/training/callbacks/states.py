"""What callbacks keep when the process ends: the `state_dict()` of each, as JSON in the checkpoint."""

import json
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning import Callback

from lm.errors import ConfigError
from lm.schema import Tree
from lm.storage.reading import MIB, parse_json

_MOST_MIB, _DEEPEST = 64, 100  # of a state, as JSON: more would be saved, and refused where the checkpoint is read


def require_apart(callbacks: Iterable[Callback]) -> None:
    """Raises ConfigError where two callbacks would keep their states under one name."""
    keys = Counter(callback.state_key for callback in callbacks if type(callback).state_dict is not Callback.state_dict)
    for key, n in keys.items():
        if n > 1:
            raise ConfigError(f"callbacks: {n} keep a state as {key}, which is one place. Give each a property state_key of its own.")


def states_of(callbacks: Iterable[Callback]) -> Tree:
    """Returns the states by `state_key`, without those that are empty. Raises ConfigError for one that JSON does not give back as it is."""
    return {callback.state_key: _kept(callback, state) for callback in callbacks if (state := callback.state_dict())}


def load_states(callbacks: Iterable[Callback], saved: Mapping[str, Tree], say: Callable[[str], None]) -> None:
    """Gives callbacks the states that a checkpoint has of them, and says of which callbacks there is only a state."""
    left = dict(saved)
    for callback in callbacks:
        if (state := left.pop(callback.state_key, None)) is not None:
            callback.load_state_dict(state)
    for key in left:
        say(f"callbacks: the checkpoint has a state of {key}, which is none of them now, so that the next one is without")


def _kept(callback: Callback, state: Any) -> Tree:
    """Returns a copy, which the callback does not change while it is written."""
    try:
        data = json.dumps(state, allow_nan=False, ensure_ascii=False).encode()
        kept = parse_json(data, deepest=_DEEPEST) if len(data) <= _MOST_MIB * MIB else None
    except (TypeError, ValueError, RecursionError):
        kept = None
    if not isinstance(kept, dict) or kept != state:
        shown = " ".join(reprlib.repr(state).split())[:80]
        what = "is a dict of finite numbers, texts, None, lists and dicts whose keys are texts"
        rule = f"{what}, of {_MOST_MIB} MiB and {_DEEPEST} levels at most, since a checkpoint holds no pickle"
        raise ConfigError(f"callbacks: state_dict() of {type(callback).__name__} gave {shown}, and a state {rule}. Convert it there.")
    return kept
