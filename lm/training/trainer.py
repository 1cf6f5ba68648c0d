"""The Lightning Trainer of a run, with its callbacks."""

import warnings
from collections.abc import Sequence
from typing import Any

from lightning import Callback, Trainer

from lm import heap
from lm.errors import ConfigError, expect
from lm.training.callbacks.bad_steps import BadSteps, Rollback
from lm.training.callbacks.checkpoints import Checkpoints
from lm.training.callbacks.ends import StopOnSignal, TimeBox
from lm.training.callbacks.metrics import Metrics
from lm.training.callbacks.profile import Profile
from lm.training.callbacks.samples import Samples
from lm.training.callbacks.states import require_apart
from lm.training.callbacks.validation import Validation
from lm.training.config import TrainConfig
from lm.training.launch.ranks import device_kind
from lm.training.loss_scale import Half

_REFUSED = {
    "Checkpoint": "saves what only it can load. Set checkpoint.every and checkpoint.keep_last",
    "EarlyStopping": "waits for a validation of Lightning's. Set trainer.early_stop",
    "GradientAccumulationScheduler": "changes an accumulation that follows from the ranks. Set data.global_batch and trainer.micro_batch",
    "StochasticWeightAveraging": "takes the learning rate over. Set trainer.ema_decay, or schedule=wsd",
    "WeightAveraging": "swaps weights that are in slices. Set trainer.ema_decay",
    "BaseFinetuning": "gives the optimizer weights that it does not know by name. Set trainer.freeze",
    "ModelPruning": "renames the weights that it prunes. Set them to 0 in on_train_batch_end of a callback of your own",
    "BasePredictionWriter": "waits for predictions, and a run makes none. Leave it out",
    "LearningRateFinder": "trains before the run. Sweep over optim.lr with -m",
    "BatchSizeFinder": "trains before the run. Try check=true",
    "ProgressBar": "writes over the run's own lines. Leave it out",
    "LearningRateMonitor": "needs a logger of Lightning's. The rate is in metrics.jsonl, and logger= shows it",
    "DeviceStatsMonitor": "needs a logger of Lightning's. Add a metric of your own",
    "ThroughputMonitor": "needs a logger of Lightning's. The throughput is in metrics.jsonl, and logger= shows it",
}
"""Callbacks of Lightning's that do not work here, why, and what does the same."""


_NEVER = {
    **dict.fromkeys(("on_validation", "on_sanity", "on_test"), "the run validates and tests by itself, before the on_train_batch_end of a"
                    " callback, which finds the figures in module.run.counters"),
    "on_predict": "a run predicts nothing. Leave it out",
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), "checkpoints are the run's own, and hold what state_dict() returns"),
}  # fmt: skip
"""Beginnings of the names of Lightning's hooks that are not called here, and why."""


CALLBACKS = (StopOnSignal, BadSteps, Metrics, TimeBox, Rollback, Profile, Validation, Samples)
"""The built-in callbacks in the order of their calls: BadSteps before Rollback, which may take the run back; TimeBox behind Metrics, which
reads the clock. Further ones follow, and last Checkpoints, which saves what all others have counted, and ends the run."""


def _require_usable(callback: Any) -> None:
    """Raises ConfigError for what is no Lightning callback, and for one that would break the run or have no effect."""
    expect("callbacks", callback, Callback, "Each is an object of a Callback of Lightning's")
    for kind in type(callback).__mro__:
        if kind.__module__.startswith("lightning.") and kind.__name__ in _REFUSED:
            raise ConfigError(f"callbacks: {type(callback).__name__} {_REFUSED[kind.__name__]}.")
    own = [names for kind in type(callback).__mro__ if not kind.__module__.startswith("lightning.") for names in vars(kind)]
    for name in (*own, *vars(callback)):  # of an object: a LambdaCallback's
        if why := next((why for start, why in _NEVER.items() if name.startswith(start) and hasattr(Callback, name)), None):
            raise ConfigError(f"callbacks: {name} of {type(callback).__name__} would never be called: {why}.")


def build_trainer(cfg: TrainConfig, accumulation: int, strategy: Any, callbacks: Sequence[Callback]) -> Trainer:
    """Returns a silent Trainer; the built-in callbacks end, save, validate and log. Raises ConfigError for a callback that cannot work.

    callbacks: further ones, called after the config's.
    """
    added = [*(callback.build() for callback in cfg.callbacks.values()), *callbacks]
    for callback in added:
        _require_usable(callback)
    require_apart(added)
    if (device := device_kind(cfg.trainer.device, cfg.launch.devices)) == "cpu":
        heap.keep_freed()
    precision = "32-true" if cfg.trainer.precision == "fp32" else cfg.trainer.precision
    computes: Any = {"plugins": [Half(device)]} if precision == "fp16-mixed" else {"precision": precision}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")  # of a GPU that is left alone
        return Trainer(
            accelerator=device, devices=cfg.launch.devices, num_nodes=cfg.launch.nodes, strategy=strategy,
            **computes, max_steps=-1, max_epochs=-1, min_epochs=0,
            accumulate_grad_batches=accumulation, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*(ours() for ours in CALLBACKS), *added, Checkpoints(bool(added))],
            num_sanity_val_steps=0, limit_val_batches=0, use_distributed_sampler=False,
        )  # fmt: skip
