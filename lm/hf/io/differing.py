"""Values of options that differ, as a user types them."""

import json
import math
from typing import Any

from lm.schema import Tree


def differs(key: str, ours: Tree, there: Tree) -> str:
    """Returns 'model.key=value must be other', with the values as a user types them; of a section that is null there its name."""
    parts = key.split(".")
    sections = [".".join(parts[:n]) for n in range(1, len(parts))]
    if section := next((each for each in sections if there.get(each, "") is None), None):
        return f"model.{section} must be null"
    return f"model.{key}={_shown(ours.get(key))} must be {_shown(there.get(key))}"


def _shown(value: Any) -> str:
    """Returns a value as a user types it."""
    return value if isinstance(value, str) else json.dumps(value)


def alike(a: Any, b: Any) -> bool:
    """Returns whether two values are equal, numbers up to rounding."""
    if isinstance(a, float | int) and isinstance(b, float | int) and not isinstance(a, bool):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)
