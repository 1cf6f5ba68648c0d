"""What can go wrong for a user, one class per exit code. The text is one sentence: where, what was given, the rule, the remedy."""


class LmError(Exception):
    """An error that the command line prints as its last line, without a traceback."""

    exit_code = 1


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
