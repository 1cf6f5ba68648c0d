"""samples.md: what the model writes at each validation."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lm.storage.atomic import disk_errors


def append_samples(path: Path, step: int, shown: Sequence[Sequence[str]]) -> int:
    """One block per text, after a heading with the step; the file's length then."""
    blocks = "".join(f"\n{_fenced(part)}\n" for parts in shown for part in parts)
    with disk_errors(path):
        with path.open("a", encoding="utf-8") as file:
            file.write(f"## step {step}\n{blocks}\n")
        return path.stat().st_size


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def truncate_samples(path: Path, size: int) -> None:
    """Drop what was written after the checkpoint; a resumed run draws those samples again."""
    with disk_errors(path):
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)
