"""Validation and test: the model's losses on held-out rows, which the ranks share."""

import math

from lm.data.order import Ids, spread
from lm.data.rows.base import Rows
from lm.errors import ConfigError, NumericsError
from lm.generation.decode import eager
from lm.generation.documents import Documents
from lm.generation.evaluate import Evaluator, require_labels
from lm.generation.further import further, require_further
from lm.generation.rollouts import held_out_rewards
from lm.schema import Tree
from lm.storage.run_folder import NOT_FINITE
from lm.training.callbacks.base import RunCallback
from lm.training.module import TrainModule
from lm.training.weights.initial import start_of

HeldOut = tuple[str, Rows, Ids]  # suffix of the metrics' names, the rows, and the ids of those to read


class Validation(RunCallback):
    """Evaluates the weights that would be exported, and counts validations without improvement."""

    def __init__(self) -> None:
        self._validated = self._tested = -1  # the newest step

    def begin(self, module: TrainModule) -> None:
        for _, rows, ids in [*self._held_out(module), *self._set_aside(module)]:
            require_labels(rows, ids, module.run.data.tokenizer, module.cfg.trainer.micro_batch)
        run, cfg = module.run, module.cfg
        if cfg.eval.wanted:
            if run.splits.test is None:
                raise ConfigError(
                    "eval: it is asked of the test, and data.test_frac=0 sets no text aside for one. Raise it, such as to 0.5."
                )
            require_further(cfg.eval, cfg.objective, cfg.data, run.data, ["test"], module.model.cfg, cfg.seeds.data)

    def look_at_parent(self, module: TrainModule) -> None:
        self.validate(module)

    def step_end(self, module: TrainModule) -> None:
        if module.run.validates(module.step):
            self.validate(module)

    def finish(self, module: TrainModule) -> None:
        """Validates and tests the last step, whatever has ended the run, except after a signal, which must not wait."""
        if module.run.stopped_by is not None:
            return
        if self._validated != module.step:
            self.validate(module)
        if self._tested != module.step:
            self._test(module)

    def validate(self, module: TrainModule) -> None:
        """Validates. Raises NumericsError for a loss that is not finite, before such weights are saved. After the last step also tests."""
        run, step, counters = module.run, module.step, module.run.counters
        self._validated = step
        with run.clock.paused():
            with run.journal.console.during("Validating"):
                found = self._losses(module, self._held_out(module))
            _require_finite(module, "val_loss", found["val_loss"])
            counters.val_loss, counters.val_bits_per_byte = found["val_loss"], found.get("val_bits_per_byte")
            judged = module.cfg.objective.judged(found)
            if counters.best is None or judged < counters.best:
                counters.best, counters.best_val_loss, counters.best_bits_per_byte = judged, counters.val_loss, counters.val_bits_per_byte
                counters.best_step, counters.worse_validations = step if module.cfg.checkpoint.best else None, 0
            else:
                counters.worse_validations += 1
            run.journal.record({"step": step, "tokens": run.tokens(step), **found})
            if run.done(step) and not run.last(step):
                worse = counters.worse_validations
                run.journal.record({"step": step, "event": "stopped early", "validations_without_improvement": worse})
        if run.done(step):
            self._test(module)

    def _test(self, module: TrainModule) -> None:
        """Evaluates the rows set aside for the test. Only once, at the end: a test looked at while choosing a model is no test."""
        run, self._tested = module.run, module.step
        if rows := self._set_aside(module):
            with run.clock.paused(), run.journal.console.during("Testing"), eager(module.cfg.trainer.compile):
                documents = Documents(*rows[0][1:], run.data.tokenizer, module.cfg.trainer.micro_batch)
                found = self._losses(module, rows, documents)
                for name in (name for name in found if name.startswith("val_loss")):
                    _require_finite(module, name.replace("val_", "test_", 1), found[name])
                told = documents.found(run.eval_ranks.total(*documents.flat()))
            if run.ranks.first:
                run.folder.write_test_documents(told.tree())
            run.counters.test = {name.replace("val_", "test_", 1): value for name, value in found.items()}
            run.journal.record({"step": module.step, "tokens": run.tokens(module.step), **run.counters.test})

    def _losses(self, module: TrainModule, wanted: list[HeldOut], documents: Documents | None = None) -> Tree:
        """Returns the losses as a record of metrics.jsonl.  documents: where given, filled per document, and the test's further metrics are
        measured."""
        run, cfg = module.run, module.cfg
        found: Tree = {}
        closely = documents is not None
        measure = cfg.objective.measure(None if cfg.init_from is None else start_of(cfg))
        evaluator = Evaluator(module.model, run.data.tokenizer, cfg.trainer.micro_batch, measure, run.eval_ranks)
        with module.exported_weights():
            for suffix, rows, ids in wanted:
                of = evaluator.totals(rows, ids, closely, documents).figures()
                told = {name: value for name, value in of.items() if name.startswith("val_")}
                told |= held_out_rewards(evaluator, cfg.objective, [(rows, ids)], in_step=cfg.strategy.slices_weights)
                found |= {f"{name}{suffix}": value for name, value in told.items()}
            if closely:
                found |= further(evaluator, cfg.eval, cfg.objective, cfg.data, run.data, ["test"], cfg.seeds.data)
        return found

    def _held_out(self, module: TrainModule) -> list[HeldOut]:
        """Returns the validation rows of all sources together, and of each source."""
        splits, n = module.run.splits, module.cfg.data.val_rows
        named = [("", splits.val), *((f"/{name}", rows) for name, rows in splits.named.items())]
        return [(suffix, rows, spread(len(rows), n)) for suffix, rows in named]

    def _set_aside(self, module: TrainModule) -> list[HeldOut]:
        rows = module.run.splits.test
        return [] if rows is None else [("", rows, spread(len(rows), module.cfg.data.val_rows))]


def _require_finite(module: TrainModule, name: str, loss: float) -> None:
    if not math.isfinite(loss):
        run = module.run
        run.journal.record({"step": module.step, "event": NOT_FINITE, "of": name})
        raise NumericsError(
            f"train: {name} is {loss} after step {module.step}, and the weights are not saved; {run.last_checkpoint()}."
            f" Lower optim.lr={run.cfg.optim.lr:g}, or use trainer.precision=fp32."
        )
