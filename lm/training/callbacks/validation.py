"""What a model is worth at a step: its losses on held-out rows, which the ranks share."""

import math

from lm.data.order import Ids, spread
from lm.data.rows.base import Rows
from lm.errors import NumericsError
from lm.generation.evaluate import evaluate, require_labels
from lm.schema import Tree
from lm.training.callbacks.base import RunCallback
from lm.training.module import TrainModule
from lm.training.weights.initial import parent


class Validation(RunCallback):
    """Evaluates the weights that would be exported, and counts how long they have not become better."""

    def __init__(self) -> None:
        self._validated = -1  # the newest step

    def begin(self, module: TrainModule) -> None:
        for _, rows, ids in self._held_out(module):
            require_labels(rows, ids, module.run.data.tokenizer, module.cfg.trainer.micro_batch)

    def look_at_parent(self, module: TrainModule) -> None:
        self.validate(module)

    def step_end(self, module: TrainModule) -> None:
        if module.run.validates(module.step):
            self.validate(module)

    def finish(self, module: TrainModule) -> None:
        """The last step is validated, whoever has made it the last; a signal waits for nothing."""
        if module.run.stopped_by is None and self._validated != module.step:
            self.validate(module)

    def validate(self, module: TrainModule) -> None:
        """Raises NumericsError for a loss that is not finite, before such weights are saved."""
        run, step, counters = module.run, module.step, module.run.counters
        self._validated = step
        with run.clock.paused():
            with run.journal.console.during("Validating"):
                found = self._losses(module)
            counters.val_loss, counters.val_bits_per_byte = found["val_loss"], found["val_bits_per_byte"]
            if not math.isfinite(found["val_loss"]):
                raise NumericsError(
                    f"train: val_loss is {counters.val_loss} after step {step}, and the weights are not saved; {run.last_checkpoint()}."
                    f" Lower optim.lr={run.cfg.optim.lr:g}, or use trainer.precision=fp32."
                )
            if counters.best_val_loss is None or found["val_loss"] < counters.best_val_loss:
                counters.best_val_loss, counters.worse_validations = found["val_loss"], 0
            else:
                counters.worse_validations += 1
            run.journal.record({"step": step, "tokens": run.tokens(step), **found})
            if run.done(step) and not run.last(step):
                worse = counters.worse_validations
                run.journal.record({"step": step, "event": "stopped early", "validations_without_improvement": worse})

    def _losses(self, module: TrainModule) -> Tree:
        """As metrics.jsonl has them, of all held-out rows and of each source's."""
        run, cfg = module.run, module.cfg
        found: Tree = {}
        start = cfg.init_from
        measure = cfg.objective.measure(None if start is None else lambda: parent(start).to(module.device))
        with module.exported_weights():
            for suffix, rows, ids in self._held_out(module):
                of = evaluate(module.model, rows, ids, run.data.tokenizer, cfg.trainer.micro_batch, run.ranks, measure)
                found |= {f"{name}{suffix}": value for name, value in of.items() if name.startswith("val_")}
        return found

    def _held_out(self, module: TrainModule) -> list[tuple[str, Rows, Ids]]:
        """Of all sources, and of each: what their numbers' names end in, and which rows are read."""
        splits, n = module.run.splits, module.cfg.data.val_rows
        named = [("", splits.val), *((f"/{name}", rows) for name, rows in splits.named.items())]
        return [(suffix, rows, spread(len(rows), n)) for suffix, rows in named]
