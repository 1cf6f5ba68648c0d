"""`lm train [overrides]`: composes a config and trains it, or with -m every combination of a sweep."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lm.cli.compose import catalog
from lm.cli.compose.compose import compose, fields
from lm.cli.compose.overrides import expand
from lm.cli.views.describe import default_text, sentence, table, type_text, value_text
from lm.config import did_you_mean
from lm.errors import ConfigError, Interrupted
from lm.training.config import TrainConfig
from lm.training.launch.signals import requeue

_FLAGS = ("-m", "--multirun", "--cfg", "--config-dir", "--help")


@dataclass(frozen=True)
class Call:
    """The arguments, flags apart from overrides; flags stand anywhere."""

    overrides: list[str]
    multirun: bool
    show_config: bool


def run(args: Sequence[str]) -> int:
    """Exit code; raises LmError."""
    call = parse_call(args)
    jobs = expand(call.overrides) if call.multirun else [call.overrides]
    if call.show_config:
        print("---\n".join(_composed_yaml(job) for job in jobs), end="")
        return 0
    if call.multirun:
        from lm.cli.compose.multirun import multirun

        return multirun(jobs)
    config = compose_config(call.overrides)
    if config.check:
        from lm.training.check import check

        check(config, _train, print)
        return 0
    command = shlex.join(["lm", "train", *catalog.flags(), *args])
    try:
        _train(config, command)
    except Interrupted as stopped:
        print(f"resume: {command}", file=sys.stderr)
        requeue(stopped)
        raise
    _report(Path(config.run.dir).expanduser() / config.run.name)
    return 0


def _train(config: TrainConfig, command: str | None = None) -> None:
    """In this process, or in ranks of its own."""
    if config.strategy.kind == "single":
        from lm.training.run import train

        train(config, command)
    else:
        from lm.training.launch.launcher import launch

        launch(config, command)


def _report(folder: Path) -> None:
    """The run is complete, whatever happens here."""
    from lm.report.page import write_report

    try:
        path = write_report(folder)
    except Exception as error:
        print(f"report: not written ({' '.join(str(error).split())}). The run itself is complete; train again to retry.", file=sys.stderr)
    else:
        print(f"report: {path}")


def help_text(args: Sequence[str]) -> str:
    """Usage, recipes, groups, and every option of the composition at hand with its type, value and meaning."""
    composition = compose(parse_call(args).overrides)
    rows = []
    for path, field in fields(TrainConfig, composition.tree):
        said = composition.stated(path)
        rows.append((path, type_text(field), value_text(said[-1][1]) if said else default_text(field), sentence(field)))
    recipes = [(f"recipes={name}", catalog.headline("recipes", name)) for name in catalog.groups()["recipes"]]
    groups = [(group, f"[{composition.choices.get(group)}]", ", ".join(options)) for group, options in sorted(catalog.groups().items())]
    return "\n".join(
        [
            "usage: lm train [group=option ...] [key=value ...] [-m] [--cfg job]\n",
            "  -m, --multirun   run every combination of values, such as seed=0,1,2 or optim=glob(*); again: only what is missing",
            "  --cfg job        print the composed config and stop",
            "  --config-dir FOLDER   recipes and options of your own, in folders like those of conf/\n",
            f"recipes:\n{table(recipes)}\n",
            f"groups, with the option chosen:\n{table([row for row in groups if row[0] != 'recipes'])}\n",
            f"options, with type and value ({', '.join(f'{group}={option}' for group, option in composition.choices.items() if option)}):",
            table(rows),
            "\n`lm explain KEY` says where a value comes from.",
        ]
    )


def parse_call(args: Sequence[str]) -> Call:
    """Raises ConfigError for an unknown flag."""
    overrides: list[str] = []
    multirun, cfg = False, False
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        if arg in ("-m", "--multirun"):
            multirun = True
        elif arg == "--cfg" or arg.startswith("--cfg="):
            what = arg.removeprefix("--cfg=") if "=" in arg else (queue.pop(0) if queue else "")
            if what != "job":
                raise ConfigError(f"--cfg: '{what}' is not something to print. Write --cfg job.")
            cfg = True
        elif arg.startswith("-"):
            raise ConfigError(f"{arg}: there is no such flag. {did_you_mean(arg, _FLAGS)}")
        else:
            overrides.append(arg)
    return Call(overrides, multirun, cfg)


def compose_config(overrides: Sequence[str]) -> TrainConfig:
    """The validated config; what was left out of presets is told on stderr."""
    composition = compose(overrides)
    config = composition.config()
    for note in composition.notes:
        print(note, file=sys.stderr)
    return config


def _composed_yaml(overrides: Sequence[str]) -> str:
    return yaml.safe_dump(compose_config(overrides).tree(), sort_keys=False, allow_unicode=True)
