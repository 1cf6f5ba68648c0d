"""`lm train [overrides]`: composes a config and trains it, or with -m every combination of a sweep."""

import shlex
from pathlib import Path

import lm
from lm import plugins
from lm.cli.compose import catalog
from lm.cli.compose.arguments import FLAGS, parse_call
from lm.cli.compose.compose import compose, compose_config
from lm.cli.compose.keys import fields
from lm.cli.compose.layers import Composition
from lm.cli.compose.overrides import expand
from lm.cli.listing import known
from lm.cli.verb import Verb
from lm.cli.views.further import next_commands
from lm.cli.views.help import Entry, entries
from lm.cli.views.text import default_text, sentence, type_text, value_text
from lm.errors import Interrupted
from lm.printing import answer, note, say
from lm.progress import progress
from lm.storage.checkpoint import newest_valid, step_folder
from lm.storage.reading import yaml_text
from lm.storage.run_folder import RunFolder
from lm.training.launch.parent import end_with_parent, on_first_machine

_TOLD = ("recipes", "model", "data", "objective", "optim")  # groups whose options the first line names


class Train(Verb):
    """usage: lm train [group=option ...] [key=value ...] [-m] [--cfg job]

    Pretrains, fine-tunes and resumes: the same command goes on where it has stopped.

    -m, --multirun   run every combination of values, such as seed=0,1,2 or optim=glob(*); again: only what is missing
    --cfg job        print the composed config and stop
    --config-dir FOLDER   recipes and options of your own, in folders like those of conf/
    """

    words = FLAGS
    takes = None

    def run(self, rest: list[str]) -> None:
        """Trains, or sweeps, or prints a config."""
        end_with_parent()
        call = parse_call(rest)
        jobs = expand(call.overrides) if call.multirun else [call.overrides]
        if call.show_config:
            answer("---\n".join(yaml_text(compose_config(job).tree()) for job in jobs), end="")
        elif call.multirun:
            from lm.cli.compose.multirun import multirun

            multirun(jobs)
        else:
            composition = compose(call.overrides)
            composition.keep_past()
            if (ended := _ended(composition)) is not None:
                _report(ended)
            else:
                _run(composition, shlex.join(["lm", "train", *catalog.flags(), *plugins.flags(), *rest]))

    @classmethod
    def help_text(cls, rest: list[str]) -> str:
        """Returns usage, recipes, groups, and every option of this composition with its type, value and meaning."""
        composition = compose(parse_call(rest).overrides)
        sections: dict[str, list[Entry]] = {"": []}
        for path, field in fields(known.root(), composition.tree):
            said = composition.stated(path)
            value = value_text(said[-1][1]) if said else default_text(field)
            sections.setdefault(path.rpartition(".")[0], []).append((path, f"{type_text(field)} [{value}]", sentence(field)))
        recipes = [(f"recipes={name}", "", catalog.headline("recipes", name)) for name in catalog.groups()["recipes"]]
        groups = [(f"{group}=", f"[{composition.chosen(group)}]", ", ".join(options)) for group, options in catalog.groups().items()]
        parts = [super().help_text(rest), f"recipes:\n{entries(recipes)}"]
        parts.append(f"groups, with the option chosen:\n{entries(row for row in sorted(groups) if row[0] != 'recipes=')}")
        parts += [f"{section or 'options, with type and value, of these groups'}:\n{entries(rows)}" for section, rows in sections.items()]
        return "\n\n".join([*parts, "`lm explain KEY` says where a value comes from."])


def _ended(composition: Composition) -> Path | None:
    """Returns the run's folder, and says so at once, if this same command has trained it to its last step already. Returns None where the
    training code must decide; it says the same where nothing is left to do."""
    config = composition.full()
    folder = RunFolder.of(config["run"])
    if config["plan"] or config["check"] or config["launch"]["nodes"] > 1 or not folder.exists():  # the first two write nothing in it
        return None
    with folder.lock():
        summary = folder.ended(config)
        if summary is None or summary.get("version") != lm.__version__ or folder.config()["run"] != config["run"]:
            return None
        step = summary["steps"]
        if step < config["trainer"]["max_steps"] or newest_valid(folder.checkpoints) != (step_folder(folder.checkpoints, step), []):
            return None
        composition.tell()
        say(folder.nothing_to_do(summary))
    return folder.path


def _outset(composition: Composition) -> str | None:
    """Returns a line on the run about to start, printed before the training code is imported, which takes seconds. None where nothing
    trains in that folder (plan, check), and on all machines of a SLURM job but the first."""
    config = composition.full()
    if config["plan"] or config["check"] or (config["launch"]["nodes"] > 1 and not on_first_machine()):
        return None
    parent = config["init_from"]
    groups = [group for group in _TOLD if composition.choices.get(group) is not None and (group != "model" or parent is None)]
    chosen = [f"{group}={composition.choices[group]}" for group in groups]
    if parent is not None:
        chosen.append(f"init_from={parent}")
    return f"{RunFolder.of(config['run']).path}: {' '.join(chosen)}"


def _run(composition: Composition, command: str) -> None:
    composition.tell()
    if (told := _outset(composition)) is not None:
        say(told)
    cfg = composition.config()
    from lm.training.launch.start import train

    if cfg.plan:
        from lm.training.plan import plan

        plan(cfg, say)
        return
    if cfg.check:
        from lm.training.check import check

        check(cfg, train, say)
        return
    try:
        folder = train(cfg, command=command)
    except Interrupted as stopped:
        from lm.training.launch.signals import requeue

        note(f"resume: {command}")
        requeue(stopped)
        raise
    _report(folder.path)


def _report(folder: Path) -> None:
    """Writes the report, unless a run that had ended before has one, and prints what to do next. Errors are only noted: the run is
    complete."""
    try:
        if (path := RunFolder(folder).report()) is None:
            with progress("Writing the report"):
                from lm.report.page import write_report

                path = write_report(folder)
    except Exception as error:
        note(f"report: not written ({' '.join(str(error).split())}). The run itself is complete; train again to retry.")
    else:
        for line in (f"report: {path}", *next_commands(RunFolder(folder))):
            say(line)
