"""The git commit of the code that a run was made with."""

import subprocess
from pathlib import Path

import lm

_GIT_S = 5.0


def commit() -> str | None:
    """Returns the commit of the checkout that holds this code, or else the current folder's, with a `+` where tracked files differ from it;
    None where there is no checkout or no git."""
    here = Path(lm.__file__).parent
    folder = here if _git(here, "ls-files", "--error-unmatch", "__init__.py") is not None else Path()
    if not (found := _git(folder, "rev-parse", "HEAD")):
        return None
    return f"{found[:12]}{'+' * bool(_git(folder, 'status', '--porcelain', '--untracked-files=no'))}"


def _git(folder: Path, *args: str) -> str | None:
    """Returns the output of a git command; None where it fails."""
    try:
        found = subprocess.run(["git", *args], cwd=folder, capture_output=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.decode(errors="replace").strip()
