"""`lm train check=true`: a trial of everything that a run does, in two steps, on the real data and strategy, before the run starts."""

from collections.abc import Callable
from pathlib import Path

from lm.nn.model_config import model_config
from lm.schema import from_tree
from lm.storage.atomic import TEMPORARY, free_bytes, remove, require_space
from lm.storage.checkpoint import checkpoints
from lm.storage.model_folder import read_config
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig
from lm.training.launch.ranks import device_kind
from lm.training.plan import cost, estimate, plan, seconds_of, steps_of
from lm.units import counted, duration

_SAMPLE_TOKENS = 8
_HELD = {
    "cpu": "at its peak, with the program itself",
    "cuda": "at its peak, with what torch keeps for later",
    "mps": "reserved on the GPU",
}
"""What `memory_gib` tells, by the kind of device."""


def check(cfg: TrainConfig, run: Callable[[TrainConfig], object], say: Callable[[str], None]) -> None:
    """Trains two steps with a save and a resume between them, a validation and samples, in a folder that is removed again. Raises LmError
    where the real run would, and ResourceError where its checkpoints would not fit on the disk. run: trains a config."""
    folder = cfg.run.folder.parent
    trial = folder / f"{TEMPORARY}check-{cfg.run.name}"
    done = folder / f"{TEMPORARY}done-{cfg.run.name}"
    remove(trial)
    remove(done)
    plan(cfg, say)
    try:
        for steps in (1, 2):
            run(_small(cfg, trial, steps))
    except BaseException:
        remove(trial)
        raise
    try:
        trial.rename(done)
    except FileNotFoundError:  # all machines of a run end at once, and share the folder
        say("check: the run was tried; another of its machines tells what was found")
        return
    try:
        _report(cfg, RunFolder(done / "run"), folder, say)
    finally:
        remove(done)


def _small(cfg: TrainConfig, trial: Path, steps: int) -> TrainConfig:
    """Returns the config of a trial run of 1 or 2 steps; the second trial resumes from the first one's checkpoint. `check` stays on, so
    each step begins with its widest micro-batch."""
    tree = cfg.tree()
    tree |= {"run": {"dir": str(trial), "name": "run"}, "logger": {"kind": "jsonl"}, "resume": {}}
    tree["schedule"] |= {"warmup_steps": 0}
    tree["data"] |= {"val_rows": min(cfg.data.val_rows or cfg.trainer.micro_batch, cfg.trainer.micro_batch), "ramp": []}
    tree["trainer"] |= {"max_steps": steps, "log_every": 1, "sample_tokens": min(cfg.trainer.sample_tokens, _SAMPLE_TOKENS)}
    tree["trainer"] |= {"early_stop": None, "max_minutes": None, "profile": None}  # lest the second step is never taken
    tree["checkpoint"] |= {"every": 1, "keep_last": 1, "keep_steps": []}
    return from_tree(TrainConfig, tree)


def _report(cfg: TrainConfig, run: RunFolder, folder: Path, say: Callable[[str], None]) -> None:
    first, line = [record for record in run.metrics.read() if "loss" in record][-2:]
    updates = cfg.objective.updates_of_rows()  # of which the first draws answers
    step_s = line["step_s"] if updates == 1 else (first["step_s"] + (updates - 1) * line["step_s"]) / updates
    newest = checkpoints(run.checkpoints)[0]  # with checkpoint.best there may be another
    size = sum(path.stat().st_size for path in newest.iterdir())
    kept = cfg.checkpoint.most
    expected = estimate(cfg, model_config(read_config(run.model)["model"]))
    steps = steps_of(cfg, step_s)
    peak, tensors = f"{line['memory_gib']:.2f} GiB", f"{expected.total / 2**20:,.1f} MiB"
    whose = "this process" if cfg.launch.world == 1 else f"the largest of {cfg.launch.world} ranks"
    say(f"check: step 2 has loss {line['loss']:.4f} and gradient norm {line['grad_norm']:.3g}, and took {line['step_s']:.3g} s")
    pace = f"at the pace of {'that step' if updates == 1 else 'these steps'}; those behind the first of a process are faster"
    seconds = seconds_of(cfg, steps, step_s)
    say(f"check: {counted(steps, 'step')} take {duration(seconds)}{cost(cfg, seconds)}, {pace}")
    kind = device_kind(cfg.trainer.device, cfg.launch.devices)
    say(f"check: memory of {whose} is {peak} {_HELD[kind]}; by formula its tensors are {tensors}")
    say(f"check: {kept} checkpoints of {size:,} bytes are {kept * size:,}, and {free_bytes(folder):,} are free")
    require_space(folder, kept * size)
    say(f"check: saved, resumed, validated and {'sampled' if run.samples.path.exists() else 'exported'}; the run can start")
