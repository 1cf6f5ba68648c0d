"""The entry point of training: in this process, or in ranks that are started for it."""

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from lm import collector
from lm.errors import ConfigError, LmError, expect
from lm.storage.run_folder import RunFolder
from lm.training.config import TrainConfig

if TYPE_CHECKING:
    from lightning import Callback


def train(cfg: TrainConfig, callbacks: Sequence["Callback"] = (), command: str | None = None) -> RunFolder:
    """Trains to the last step, resuming where there is a checkpoint, and returns the run: `.summary()`, `.metrics.read()`, `.model` for
    `lm.load`, ...

    cfg: from `lm.config`. callbacks: further Lightning callbacks, called after the built-in ones but before a save, which keeps what
    their state_dict() returns; they live in this process, so with several processes name callback kinds of a plugin in the config
    instead. command: the command line as typed, for the summary.
    Raises LmError; Interrupted after SIGINT or SIGTERM, with the step finished and everything saved, so that the same call resumes.
    """
    if not isinstance(cfg, TrainConfig):
        raise ConfigError(f"train: {type(cfg).__name__} is no config of a run. Write lm.train(lm.config(overrides=[...])).")
    expect("callbacks", callbacks, (list, tuple), "Give a list of Lightning callbacks")
    if cfg.plan:
        raise ConfigError("plan=true: a run that is only planned is not trained. Leave it out, or write lm train plan=true.")
    folder = RunFolder(cfg.run.folder)
    if not cfg.strategy.launched:
        from lm.training import run

        with _as_before(cfg.trainer.device, callbacks) if command is None else nullcontext():  # the process of a command ends with it
            run.train_rank(cfg, command, callbacks)
        return folder
    if callbacks:
        given = ", ".join(type(callback).__name__ for callback in callbacks)
        raise ConfigError(f"callbacks: {given} cannot follow into the ranks of strategy={cfg.strategy.kind}. Make each a kind of a plugin.")
    from lm.training.launch.launcher import launch

    launch(cfg, command)
    return folder


@contextmanager
def _as_before(device: str, callbacks: Sequence["Callback"]) -> Iterator[None]:
    """Within the block, torch is set as in the process of a command. Behind it, a process that goes on is as it was: with its own settings,
    a scheduler's environment variables, torch's own random numbers, and the memory and open files that the run held: Lightning's parts
    refer to each other, and would hold them until some later collection."""
    import torch

    from lm.ops.defaults import unset, why_not_mac

    environment = dict(os.environ)
    kind = "mps" if device == "mps" and why_not_mac() is None else "cuda"
    cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # no GPU is woken up to be asked
    try:
        with unset(), collector.nothing_left(), torch.random.fork_rng([0] if kind == "mps" else cuda, device_type=kind):
            try:
                yield
            except LmError as error:
                _let_go(error)
                raise
            finally:
                for callback in callbacks:  # which a session may keep, and to which Lightning gives methods of the module
                    own = getattr(callback, "__dict__", None)
                    if isinstance(own, dict):  # else it is no callback, but a number or a class, and refused as that
                        for name in ("log", "log_dict"):
                            own.pop(name, None)
    finally:
        os.environ.update({name: value for name, value in environment.items() if name not in os.environ})


def _let_go(error: BaseException | None) -> None:
    """Clears the variables of all calls that an error has ended. Its sentence says what to do, and it may be kept for as long as a session
    lasts, as IPython keeps the last one; the model and the optimizer of an interrupted run would stay on the GPU beside the next one's."""
    seen = set[int]()
    while error is not None and id(error) not in seen:  # an error may be its own cause
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
