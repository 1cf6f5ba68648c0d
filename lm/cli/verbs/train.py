"""`lm train [overrides]`: composes a config and trains it, or with -m every combination of a sweep."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lm import plugins
from lm.cli.compose import catalog
from lm.cli.compose.arguments import parse_call
from lm.cli.compose.compose import compose, compose_config
from lm.cli.compose.keys import fields
from lm.cli.compose.overrides import expand
from lm.cli.views.text import default_text, sentence, table, type_text, value_text
from lm.errors import Interrupted
from lm.storage.reading import yaml_text
from lm.training.config import TrainConfig
from lm.training.launch.signals import requeue


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
    cfg = compose_config(call.overrides)
    from lm.training.launch.start import train

    if cfg.check:
        from lm.training.check import check

        check(cfg, train, print)
        return 0
    command = shlex.join(["lm", "train", *catalog.flags(), *plugins.flags(), *args])
    try:
        folder = train(cfg, command=command)
    except Interrupted as stopped:
        print(f"resume: {command}", file=sys.stderr)
        requeue(stopped)
        raise
    _report(folder.path)
    return 0


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


def _composed_yaml(overrides: Sequence[str]) -> str:
    return yaml_text(compose_config(overrides).tree())
