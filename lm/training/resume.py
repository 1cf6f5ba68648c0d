"""Which differences a resumed run may have."""

from pathlib import Path

import yaml

from lm.config import Tree
from lm.errors import ConfigError
from lm.record import flatten

_MAY_CHANGE = (
    "run.", "launch.", "strategy.", "logger.", "checkpoint.", "resume.", "traceback", "trainer.micro_batch", "trainer.val_every",
    "trainer.log_every", "trainer.sample_", "trainer.device", "trainer.compile", "trainer.early_stop", "data.workers", "data.cache_dir",
)  # fmt: skip


def require_same_run(path: Path, now: Tree) -> None:
    """ConfigError with every difference from the config.yaml of the run folder that may not change; max_steps may grow."""
    try:
        before = flatten(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}). Restore it, or set run.name to start a new run.") from None
    after = flatten(now)
    changed = [key for key in before | after if before.get(key) != after.get(key) and not key.startswith(_MAY_CHANGE)]
    old, new = before.get("trainer.max_steps"), after["trainer.max_steps"]
    changed = [key for key in changed if not (key == "trainer.max_steps" and isinstance(old, int) and new > old)]
    if changed:
        lines = [f"  {key}: {before.get(key, 'absent')} in the run, {after.get(key, 'absent')} now" for key in changed]
        raise ConfigError(
            "\n".join(lines) + f"\n{path.parent}: the run exists with another config ({', '.join(changed[:3])}), and a resumed run may only"
            " change where and how often it works. Set run.name to start a new run, or restore the values."
        )
