"""Reports and counts non-finite steps; after a loss spike, may roll the run back to its last checkpoint."""

import math
from dataclasses import replace
from pathlib import Path

from lm.errors import NumericsError
from lm.storage.atomic import discard
from lm.storage.checkpoint import CheckpointReader, checkpoints, newest_valid, step_of
from lm.storage.run_folder import NOT_FINITE
from lm.training.callbacks.base import RunCallback
from lm.training.module import TrainModule
from lm.training.numerics import is_spike, with_loss
from lm.training.state import Saved


class BadSteps(RunCallback):
    """Records the rows of skipped steps, and ends the run where too many steps in a row are not finite."""

    def __init__(self) -> None:
        self._told = 0  # number of this process's bad steps that are recorded already

    def step_end(self, module: TrainModule) -> None:
        run, step = module.run, module.step
        if not (run.logs(step) or run.validates(step) or run.saves(step) or module.device.type == "cpu"):
            return  # reading the verdicts would wait for the device
        verdicts = module.verdicts
        bad, stuck = verdicts.bad_steps(self._told), bool(verdicts.stuck)
        for one in bad:
            event = NOT_FINITE if stuck and one == bad[-1] else "skipped"
            run.journal.record({"step": one + 1, "event": event, "rows": run.rows_of(one)})
        self._told = int(verdicts.n_bad)
        run.counters.skipped += len(bad)
        if stuck:
            wider = ". float16 ends at 65,504: set trainer.precision=fp32" if module.loss_scale is not None else ""
            raise NumericsError(
                f"train: step {bad[-1] + 1} has loss {float(verdicts.loss):.4g} over {float(verdicts.labels):.0f} labels and gradient norm"
                f" {float(verdicts.norm):.4g}, and only finite steps are taken; the weights are as before it, and {run.last_checkpoint()}"
                f"{wider}. Lower optim.lr={run.cfg.optim.lr:g} or optim.clip, set numerics.skip_in_a_row, or look at the rows of that"
                f" step, which {run.folder.metrics.path} names."
            )


class Rollback(RunCallback):
    """Records a spike of the logged loss. Where numerics.rollbacks allows, restores the last checkpoint on schedule and goes on from there
    with the rows after the spike. What a stop has saved does not count, since a run that was never stopped has none of it."""

    def step_end(self, module: TrainModule) -> None:
        run, step = module.run, module.step
        if not run.logs(step):
            return
        loss, numerics = run.logged["loss"], run.cfg.numerics
        if not math.isfinite(loss):
            return
        if not is_spike(loss, run.counters.recent_losses, numerics.spike_factor):
            run.counters.recent_losses = with_loss(run.counters.recent_losses, loss)
            return
        run.journal.record({"step": step, "event": "loss spike", "loss": loss, "rows": run.rows_of(step - 1)})
        run.saver.wait()
        wanted = run.counters.rolled_back < numerics.rollbacks
        path = run.ranks.from_first(lambda: self._to_go_back_to(run.folder.checkpoints, step, run.cfg.checkpoint.every)) if wanted else None
        if wanted and path is None:
            run.journal.console.say(
                "numerics.rollbacks: there is no checkpoint yet to go back to. A lower checkpoint.every makes one sooner"
            )
        if path is not None:
            self._go_back(module, CheckpointReader(path, verified=True))

    @staticmethod
    def _to_go_back_to(folder: Path, step: int, every: int) -> Path | None:
        """Returns the newest checkpoint on schedule; the newest of all where that is gone, or the schedule was another then."""
        due = newest_valid(folder, every=every)[0]
        return due if due is not None or step <= every else newest_valid(folder)[0]

    def _go_back(self, module: TrainModule, reader: CheckpointReader) -> None:
        run, step, before, at = module.run, module.step, module.run.counters, int(reader.meta["step"])
        module.restore(reader)
        module.restore_callbacks(reader)
        for path in checkpoints(run.folder.checkpoints) if run.ranks.first else []:
            if step_of(path) > at:
                discard(path)
        rows_from, saved = before.rows_from + step - at, Saved.of(reader).counters
        run.counters = replace(
            saved, rolled_back=before.rolled_back + 1, rows_from=rows_from, train_s=before.train_s,
            max_steps=before.max_steps,
        )  # fmt: skip
        run.saved_step = -1
        run.clock.start(at)
        run.journal.go_back(at, run.counters.samples_bytes, before.rolled_back)
        left_out = (step - at) * run.cfg.data.global_batch
        run.journal.record({"step": at, "event": "rolled back", "from_step": step, "rows_left_out": left_out})
        told = (record.get("event") == "length decided" for record in run.folder.metrics.each())
        if before.max_steps != saved.max_steps and run.ranks.first and not any(told):  # an earlier rollback to here may have told it
            run.journal.record({"step": at, "event": "length decided", "max_steps": before.max_steps})
        module.step, module.stepped = at, False
