"""Faults of the token cache."""

import errno
import os
from pathlib import Path

from lm.errors import ConfigError, LmError, ResourceError

_OF_THE_CACHE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
_REMEDIES = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit (ulimit -n)"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Change its permissions"),
    errno.ENOMEM: "Free memory",
}


def unreadable(file: Path, error: Exception) -> LmError:
    """Returns the error of a file whose content is damaged, or which the system does not let be read: then the cache is as good as ever."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None or code in _OF_THE_CACHE:
        return damaged(file, f"cannot be read ({error})")
    remedy = _REMEDIES.get(code, "Check the disk")
    return ResourceError(f"{file}: cannot be read ({os.strerror(code)}). {remedy}, and start again.")


def damaged(file: Path, fault: str) -> ConfigError:
    """Returns the error of a file that is not as it was written."""
    return ConfigError(f"{file}: the token cache is damaged: it {fault}. Delete {file.parent}, and it is built anew.")
