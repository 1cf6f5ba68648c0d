"""`python -m lm.testing plugins=FILE.py [overrides]`: `check_kind` of each kind of a plugin that these overrides choose.

Prints a line for each; the first that does not keep what holds for every kind ends it with one sentence and exit code 1.
"""

import sys
from collections.abc import Sequence

import lm
from lm import plugins
from lm.errors import ConfigError, LmError, internal
from lm.printing import note, open_door, say, trace
from lm.testing import check_kind

_SHOW = "traceback=true"


def main(args: Sequence[str]) -> int:
    """Returns the exit code."""
    open_door()
    name = "lm.testing"
    try:
        chosen = plugins.parts(lm.config(overrides=[arg for arg in args if arg != _SHOW]))
        if not chosen:
            raise ConfigError("lm.testing: no kind of a plugin is chosen. Name its file and it, as in plugins=my_norm.py model/norm=l1.")
        for kind in chosen:
            name = f"{type(kind).__name__}, kind={kind.kind}"
            check_kind(kind)
            say(f"{name}: keeps what holds for every kind")
    except Exception as error:
        if _SHOW in args:
            trace()
        if isinstance(error, AssertionError) and str(error):
            said = str(error).partition(": Tensor-likes")[0].rstrip(".")
            note(f"{name}: {said}. {_SHOW} shows by which numbers.")
            return 1
        told = error if isinstance(error, LmError) else internal(error)
        note(str(told))
        return told.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
