"""What can go wrong for a user, one class per exit code. The text is one sentence: where, what was given, the rule, the remedy."""

import os
from collections.abc import Sequence
from traceback import walk_tb

from lm.printing import one_line

_FORKS = ("_execute_child", "_launch")  # functions of subprocess and multiprocessing that start a process
_HEAD, _TAIL = 1000, 900  # characters of a sentence: what was given may be long, and where it stood and the remedy are at its ends


class LmError(Exception):
    """An error that the command line prints as its last line, without a traceback. Line ends in it, of a field's name say, are escaped."""

    exit_code = 1

    def __init__(self, sentence: str, before: Sequence[str] = ()) -> None:
        """before: lines to be shown above the sentence."""
        sentence = one_line(sentence)
        if len(sentence) > _HEAD + _TAIL:
            sentence = f"{sentence[:_HEAD]}...{sentence[-_TAIL:]}"
        self.sentence, self.before = sentence, before
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> list[str]:
        """All that is to be shown, the sentence last."""
        return [*self.before, self.sentence]


class ConfigError(LmError):
    """Bad configuration, command line or input data."""

    exit_code = 2


class CheckpointError(LmError):
    """A checkpoint or model folder that is missing, damaged or does not fit."""

    exit_code = 3


class NumericsError(LmError):
    """A loss, gradient or weight that is not finite."""

    exit_code = 4


class ResourceError(LmError):
    """Not enough disk or memory, or a folder that cannot be written."""

    exit_code = 5


class Interrupted(LmError):
    """A signal ended the run after the step was finished and saved; the exit code is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class SweepError(LmError):
    """Some jobs of a sweep failed; the exit code is that of the first."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def expect(name: str, given: object, wanted: type | tuple[type, ...], remedy: str) -> None:
    """Raises ConfigError for an argument of another type, as a program may give one that no type checker reads."""
    if not isinstance(given, wanted):
        raise ConfigError(f"{name}: {type(given).__name__} was given. {remedy}.")


def internal(error: BaseException) -> LmError:
    """Returns what is told of an error that should not have come up."""
    if _no_more_processes(error):
        found = "the system starts no more threads or processes for this user or job"
        return ResourceError(f"{found}. Raise the limit (ulimit -u, ulimit -v, pids.max), or lower OMP_NUM_THREADS and data.workers.")
    said = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".: ")
    if place := place_in_plugin(error):
        return LmError(f"{place}: {said}. The plugin raises it; traceback=true shows the way there.")
    remedy = "Run again with traceback=true to see where, and report it"
    if plugins := _plugins():  # a method that is called as it is not defined, or returns what it should not, breaks in our lines
        names = ", ".join(map(os.path.basename, plugins))
        remedy = f"If it is about what {names} defines, mend it there (python -m lm.testing tests it). Else report it, with traceback=true"
    return LmError(f"internal error: {said}. {remedy}.")


def _no_more_processes(error: BaseException | None) -> bool:
    """Whether an error, or one that it came up after, says that no thread or process can be started."""
    if error is None:
        return False
    said = str(error).startswith("can't start new thread")  # of threading, a RuntimeError; of fork it is EAGAIN
    forked = isinstance(error, BlockingIOError) and any(frame.f_code.co_name in _FORKS for frame, _ in walk_tb(error.__traceback__))
    return said or forked or _no_more_processes(error.__cause__ or error.__context__)


def place_in_plugin(error: BaseException) -> str | None:
    """Returns the file and line of a plugin at which an error came up; None where it did in no plugin."""
    plugins = _plugins()
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename in plugins]
    return "{}:{}".format(*places[-1]) if places else None


def _plugins() -> list[str]:
    """Returns the files of plugins, as lm.plugins leaves them to other processes."""
    return [*filter(None, os.environ.get("LM_PLUGINS", "").split(os.pathsep))]
