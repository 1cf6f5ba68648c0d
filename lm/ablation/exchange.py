"""The baseline trained on half and on twice its tokens, to express a difference in tokens. These runs branch off the compared runs."""

import shutil

from lm.ablation.matching import moved
from lm.errors import ConfigError
from lm.storage.atomic import atomic_folder
from lm.storage.checkpoint import checkpoints, newest_valid
from lm.storage.manifest import listed_files
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig

LENGTHS = (0.5, 2.0)


def branched(cfg: TrainConfig, factor: float) -> TrainConfig:
    """Returns the same training over `factor` times the steps. The warm-up keeps its length, so that both trainings are the same up to the
    first decay of the rate; a mixture's phases keep their share of the steps, so that the tokens are of the same text.

    Raises ConfigError where no step is left after the warm-up.
    """
    steps = round(factor * cfg.trainer.max_steps)
    if steps <= cfg.schedule.warmup_steps:
        given = f"{factor:g} times trainer.max_steps={cfg.trainer.max_steps} is not above schedule.warmup_steps={cfg.schedule.warmup_steps}"
        raise ConfigError(f"exchange=true: {given}, which all lengths share. Train for more steps, or leave exchange out.")
    return moved(cfg, "trainer.max_steps", steps).replace(schedule=cfg.schedule)


def leaves(cfg: TrainConfig, factor: float) -> int:
    """Returns the step of the baseline's run after which a branch leaves it; 0: they share no step, and the branch trains from scratch."""
    branch = branched(cfg, factor)
    steps = branch.trainer.max_steps
    return min(cfg.shared_steps(steps), steps - 1) if branch.data == cfg.data else 0


def trunk(cfg: TrainConfig) -> TrainConfig:
    """Returns the baseline's config, changed to keep the checkpoints from which its branches start."""
    kept = {*cfg.checkpoint.keep_steps, *filter(None, (leaves(cfg, factor) for factor in LENGTHS))}
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
