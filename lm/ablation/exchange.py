"""The baseline trained on half and on twice its tokens, to express a difference in tokens. These runs branch off the compared runs."""

import shutil

from lm.ablation.config import StudyConfig
from lm.errors import ConfigError
from lm.schema import Tree
from lm.storage.atomic import atomic_folder, listed_files
from lm.storage.checkpoint import checkpoints, newest_valid
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig

LENGTHS = (0.5, 2.0)


def branched(cfg: TrainConfig, factor: float) -> TrainConfig:
    """Returns the same training over `factor` times the steps. The warm-up keeps its length, so that both trainings are the same up to the
    first decay of the rate.

    Raises ConfigError where no step is left after the warm-up.
    """
    steps = round(factor * cfg.trainer.max_steps)
    if steps <= cfg.schedule.warmup_steps:
        given = f"{factor:g} times trainer.max_steps={cfg.trainer.max_steps} is not above schedule.warmup_steps={cfg.schedule.warmup_steps}"
        raise ConfigError(f"exchange=true: {given}, which all lengths share. Train for more steps, or leave exchange out.")
    return cfg.replace(trainer=cfg.trainer.replace(max_steps=steps))


def leaves(cfg: TrainConfig, factor: float) -> int:
    """Returns the step of the baseline's run after which a branch leaves it; 0: they share no step, and the branch trains from scratch."""
    steps = branched(cfg, factor).trainer.max_steps
    return min(cfg.shared_steps(steps), steps - 1)


def trunk(cfg: TrainConfig) -> TrainConfig:
    """Returns the baseline's config, changed to keep the checkpoints from which its branches start."""
    kept = {*cfg.checkpoint.keep_steps, *(leaves(cfg, factor) for factor in LENGTHS)} - {0}
    return cfg.replace(checkpoint=cfg.checkpoint.replace(keep_steps=sorted(kept)))


def branch_off(trunk: RunFolder, most: int, branch: RunFolder) -> None:
    """Copies the trunk's newest valid checkpoint, of a step up to `most`, into a branch that has no checkpoint yet.

    Both runs share all steps up to there, so the branch's result is the same bit for bit. If the trunk has no such checkpoint, the branch
    trains from scratch.
    """
    if checkpoints(branch.checkpoints) or (found := newest_valid(trunk.checkpoints, most)[0]) is None:
        return
    with atomic_folder(branch.checkpoints / found.name, sum(path.stat().st_size for path in found.iterdir())) as copy:
        for name in listed_files(found):
            shutil.copyfile(found / name, copy / name)


def percent(worth: Tree | None, difference: Tree) -> str:
    """Returns a difference in tokens as '+23 % [+5 %, +45 %]': with so many more tokens the baseline would be as good."""
    if worth is None:
        return "-"
    least, most = f"under {LENGTHS[0] - 1:+.0%}", f"over {LENGTHS[-1] - 1:+.0%}"
    low, high = (f"{end - 1:+.0%}" if end is not None else beyond for end, beyond in zip(worth["interval"], (least, most), strict=True))
    beyond = most if difference["mean"] < 0 else least
    mean = beyond if worth["factor"] is None else f"{worth['factor'] - 1:+.0%}"
    return f"{mean} [{low}, {high}]".replace("%", " %")


def in_tokens(row: Tree) -> str:
    """Returns a sentence on a variant's worth in tokens; '' where it is not known."""
    if row["worth"] is None:
        return ""
    factor, (_, _, interval) = row["worth"]["factor"], percent(row["worth"], row["difference"]).partition(" [")
    if factor is None:
        said = "is worth more than twice the tokens" if row["difference"]["mean"] < 0 else "costs more than half of the tokens"
    else:
        said = f"is worth {factor - 1:.0%} more tokens" if factor >= 1 else f"costs {1 - factor:.0%} of the tokens"
    return f" It {said.replace('%', ' %')} (Holm-corrected 95 % interval {interval.rstrip(']').replace(', ', ' to ')})."


def short_of(config: StudyConfig, exchange: Tree | None, rows: Tree) -> list[str]:
    """Returns warnings on why differences are not, or cannot be, expressed in tokens."""
    notes = []
    for factor, length in (exchange or {}).items():
        runs = list(length["runs"].values())
        if len(runs) < config.seeds and factor != "1":
            notes.append(f"{config.baseline}: {len(runs)} of {config.seeds} runs at {factor} times its tokens have ended.")
        if None in runs:
            lost = f"{runs.count(None)} of {len(runs)} runs at {factor} times its tokens diverged"
            notes.append(f"{config.baseline}: {lost}, so no difference is told in tokens. Start from a lower rate.")
    told = [row for row in rows.values() if row["difference"] and row["difference"]["mean"] is not None]
    if exchange and told and not notes and not any(row["worth"] for row in told):
        notes.append(
            f"{config.baseline}: more tokens do not lower {config.metric}, so no difference is told in them. Use more text, or more seeds."
        )
    return notes
