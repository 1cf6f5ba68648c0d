"""The training records of metrics.jsonl: each metric is a small function of the trainer and the module."""

import math
import platform
import re
import resource
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import cast

import torch
from lightning import Trainer

from lm.data.loader import TrainLoader
from lm.data.rows.policy import PolicyConfig
from lm.errors import ConfigError
from lm.schema import Tree
from lm.training.budget import peak_flops
from lm.training.callbacks.base import RunCallback
from lm.training.module import TrainModule
from lm.training.objectives.base import Timed

_LOGGED = 2  # logged steps in a row that are told of
_STARVED = 0.2  # part of the time
_OTHER_LINES = {"event", "val_loss", "test_loss"}  # keys by which readers of metrics.jsonl tell a line of another sort

Metric = Callable[[Trainer, TrainModule], Tree]
"""Returns numbers for a line, by name. Every rank calls it, at the end of the steps that are logged."""


class Metrics(RunCallback):
    """Writes a record with the built-in metrics and those that the config adds."""

    def begin(self, module: TrainModule) -> None:
        module.run.counters.device = device_name(module.device)
        self._added = {name: metric.build() for name, metric in module.cfg.metrics.items()}
        module.run.clock.start(module.step)
        self._starved = 0  # logged steps in a row that waited for their batches

    def step_end(self, module: TrainModule) -> None:
        run = module.run
        if not run.logs(module.step):
            return
        line: Tree = {"step": module.step}
        for metric in LINE:
            numbers = metric(module.trainer, module)
            if taken := line.keys() & numbers.keys():  # one of the objective's figures: ours have names of their own
                raise ConfigError(f"objective: '{min(taken)}' is in each line of metrics already. Give its own metric another name.")
            line |= numbers
        for name, added in self._added.items():
            numbers = added(module.trainer, module)
            _require_numbers(name, numbers, line)
            line |= {key: value if isinstance(value, int) else float(value) for key, value in numbers.items()}
        run.logged = line
        run.journal.record(line)
        self._tell_dead(module, line)
        self._tell_starved(module, line)

    def _tell_dead(self, module: TrainModule, line: Tree) -> None:
        """Records once that the gradient is exactly 0 in several logged steps in a row, as where a huge rate has driven the weights to
        where all is flat, or no answer is better than another. Such a run would end like any other."""
        counters, objective = module.run.counters, module.cfg.objective
        dead, updates = counters.dead_steps if line["grad_norm"] == 0 else [], module.run.splits.train.updates
        if dead and (dead[-1] - 1) // updates == (module.step - 1) // updates:  # of the same answers
            return
        counters.dead_steps = [*dead[:_LOGGED], module.step] if line["grad_norm"] == 0 else []
        if len(counters.dead_steps) == _LOGGED:
            why = "nothing is learned. A lower optim.lr"
            if isinstance(objective, PolicyConfig):
                cut = ", or cut, with objective.learn_cut=false" if not objective.learn_cut and line["ended"] < 1 else ""
                more = "objective.max_tokens or objective.n_answers" if cut else "objective.n_answers"
                why = f"all answers to a prompt are worth the same{cut}. Other objective.rewards, easier prompts or more {more}"
            event = f"gradient exactly 0: {why} may help"
            module.run.journal.record({"step": module.step, "event": event, "since_step": counters.dead_steps[0]})

    def _tell_starved(self, module: TrainModule, line: Tree) -> None:
        """Says once that steps wait for their batches, where several logged ones do: in the first one, workers begin. Only on the terminal,
        as it is nothing that repeats."""
        part, workers = line["data_s"] / line["step_s"], module.cfg.data.workers
        self._starved = self._starved + 1 if part > _STARVED or self._starved >= _LOGGED else 0
        if self._starved == _LOGGED:
            module.run.journal.console.say(f"{part:.0%} of the time goes by waiting for batches: data.workers={workers + 2} may help")


def _require_numbers(name: str, numbers: object, line: Tree) -> None:
    """Raises ConfigError where what a metric of the config gave are no numbers by name, or their names are not free.  line: so far."""
    if not isinstance(numbers, dict) or not all(isinstance(value, Real) for value in numbers.values()):
        shown = " ".join(str(numbers).split())[:80]
        raise ConfigError(f"metrics.{name}: it gave {shown}, and numbers by name are needed. Return {{'name': float(value)}}.")
    if told := sorted(_OTHER_LINES & numbers.keys()):
        raise ConfigError(f"metrics.{name}: '{told[0]}' marks lines of another sort in metrics. Give the number another name.")
    if taken := line.keys() & numbers.keys():
        raise ConfigError(f"metrics.{name}: '{min(taken)}' is in each line of metrics already. Give the number another name.")


def tokens(trainer: Trainer, module: TrainModule) -> Tree:
    """Tokens read since step 0."""
    return {"tokens": module.run.tokens(module.step)}


def loss(trainer: Trainer, module: TrainModule) -> Tree:
    """The loss of the last step in nats per token. Waits for the device."""
    return {"loss": float(module.loss())}


def objective_metrics(trainer: Trainer, module: TrainModule) -> Tree:
    """The objective's further metrics of the last step, as means over all ranks and micro-batches."""
    if wrong := [name for name, pair in module.metrics.items() if getattr(pair, "shape", ()) != (2,)]:
        raise ConfigError(f"objective: its metric '{wrong[0]}' is no pair. Give torch.stack([a sum, how many are in it]).")
    sums = {name: pair.tolist() for name, pair in module.metrics.items()}
    return {name: total / n if n else math.nan for name, (total, n) in sums.items()}


def rate(trainer: Trainer, module: TrainModule) -> Tree:
    """The learning rate of the weights whose peak is optim.lr, which under Muon are matrices; where there are none, as with
    optim.layer_decay, of the last group of weights."""
    groups: list[Tree] = trainer.optimizers[0].param_groups
    own = [group for group in groups if group["peak_lr"] == module.cfg.optim.lr]
    return {"lr": float((own or groups)[-1]["lr"])}


def gradient(trainer: Trainer, module: TrainModule) -> Tree:
    """The norm of the full gradient, before it is clipped."""
    return {"grad_norm": float(module.grad_norm)}


def loss_scale(trainer: Trainer, module: TrainModule) -> Tree:
    """The factor on the loss in fp16-mixed, for the next step; nothing in other precisions."""
    return {} if module.loss_scale is None else {"loss_scale": float(module.loss_scale.factor)}


def speed(trainer: Trainer, module: TrainModule) -> Tree:
    """Tokens per second and seconds per step since the previous record, without validations and saves."""
    clock, loader = module.run.clock, cast(TrainLoader, trainer.train_dataloader)
    drawing = module.objective.spent if isinstance(module.objective, Timed) else {}
    module.run.counters.train_s += clock.lap(module.step, {"data_s": loader.waited_s, **drawing})
    return {"tokens_per_second": round(_pace(module), 1), "step_s": round(clock.step_s, 5)}


def _pace(module: TrainModule) -> float:
    """Returns the tokens per second of the last lap."""
    run, clock = module.run, module.run.clock
    return (run.tokens(module.step) - run.tokens(module.step - clock.steps)) / clock.steps / clock.step_s


def worst_rank(trainer: Trainer, module: TrainModule) -> Tree:
    """Peak memory of the rank that needs most, and how long a step the rank that waits longest for its batches does so, and likewise
    whatever else the objective tells of."""
    spent = module.run.clock.spent
    most, *seconds = module.run.ranks.most(memory_gib(module.device), *spent.values())
    return {"memory_gib": round(most, 3)} | {name: round(each, 5) for name, each in zip(spent, seconds, strict=True)}


def utilisation(trainer: Trainer, module: TrainModule) -> Tree:
    """Model FLOP utilisation: the part of the GPUs' peak that the model's own arithmetic takes, with the head's for all tokens, whether
    they have labels or not; nothing where the peak is not known."""
    peak = peak_flops(torch.cuda.get_device_name()) if module.device.type == "cuda" else None
    if peak is None:
        return {}
    flops = _pace(module) * module.counts.train_flops_per_token
    return {"mfu_pct": round(100 * flops / (peak * trainer.world_size), 2)}


def data(trainer: Trainer, module: TrainModule) -> Tree:
    """Tokens and epochs read of each source of a mixture; nothing of a single source."""
    return module.run.consumed(module.step)


def experts(trainer: Trainer, module: TrainModule) -> Tree:
    """Of the last step: for each MoE layer tokens of its busiest expert over the mean tokens of its experts, and the worst of these; and
    how many experts of all layers had no token."""
    if module.loads is None:
        return {}
    ratios = [round(ratio, 4) for ratio in (module.loads.amax(-1) / module.loads.mean(-1)).tolist()]
    told: Tree = {"expert_load": max(ratios), "idle_experts": int((module.loads == 0).sum())}
    return told | {f"expert_load/{name}": ratio for name, ratio in zip(module.model.mixtures(), ratios, strict=True)}


def auxiliary(trainer: Trainer, module: TrainModule) -> Tree:
    """What layers, as routers, add to the loss of a token, by name."""
    return {name: float(loss / module.tokens_in_step) for name, loss in module.auxiliary.items()}


LINE: tuple[Metric, ...] = (
    tokens, loss, objective_metrics, rate, gradient, loss_scale, speed, worst_rank, utilisation, data, experts, auxiliary,
)  # fmt: skip
"""The built-in metrics, in this order: `speed` must stop its clock after `loss` has waited for the device."""


def device_name(device: torch.device) -> str:
    """What summary.json says of the device that a run was on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return torch.backends.mps.get_name() if device.type == "mps" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far: what torch reserved on a GPU, the resident set of the process on a CPU. A Mac's GPU has no
    peak: what is reserved now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**30
    try:  # on Linux ru_maxrss includes the peak of the process that started this one, such as a notebook of some GiB
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    unit = 1 if sys.platform == "darwin" else 1024
    return (int(found[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit) / 2**30
