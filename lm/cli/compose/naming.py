"""The folder name of a run that was given none."""

import hashlib
import re
from collections.abc import Iterable

from lm.cli.compose.overrides import Given

_LONGEST = 120  # of RunConfig.name

WHERE_AND_HOW = (
    *("run", "logger", "checkpoint", "resume", "launch", "traceback", "check"),
    *("trainer.device", "trainer.log_every", "data.cache_dir", "data.workers"),
)
"""Keys that change where and how a run goes, not what comes out: two runs that differ in these only are one run."""


def run_name(recipe: str | None, given: Iterable[Given]) -> str:
    """The recipe and the sorted overrides, e.g. 'pretrain-tiny+model.ffn-geglu+seed-1'; cut and hashed where too long.

    No '=' and no ',': the name goes unquoted into `init_from=runs/...`.
    """
    parts = {item.key: f"{item.key.replace('/', '.')}-{_text(item.value)}" for item in given if not _left_out(item.key)}
    name = "+".join(_plain(part) for part in [recipe or "run", *(parts[key] for key in sorted(parts))])
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _left_out(key: str) -> bool:
    return key == "recipes" or any(key == name or key.startswith(f"{name}.") for name in WHERE_AND_HOW)


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value).replace("e+", "e")  # 1e+30 and 1e-30 are two names


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")
