"""The parts of a training run that verbs other than `lm train` need, from the overrides of `lm train`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lm.cli.compose.arguments import overrides_of
from lm.cli.compose.compose import compose
from lm.cli.compose.layers import SPOKEN, Composition, Layer
from lm.cli.compose.quoting import path_of
from lm.errors import ConfigError
from lm.printing import note
from lm.schema import Config, flatten
from lm.spelling import did_you_mean
from lm.storage.model_folder import read_config
from lm.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from lm.data.kinds import Corpus, RowsOf
    from lm.generation.examine import Examined

P = TypeVar("P", bound=Config)
EXAMINED = ("data", "objective", "eval", "recipes", "init_from", "traceback")


def take_corpus(args: Sequence[str]) -> "Corpus":
    """Returns the data, tokenizer and objective that `lm train` would compose from these overrides. Raises ConfigError."""
    composition = compose(overrides_of(args))
    from lm.data.kinds import Corpus

    return _told(composition, Corpus)


def take_rows(args: Sequence[str]) -> "RowsOf":
    """As `take_corpus`, with what decides how the model gets the rows."""
    composition = compose(overrides_of(args))
    from lm.data.kinds import RowsOf

    return _told(composition, RowsOf)


def take_examined(args: Sequence[str], own_keys: Sequence[str], model: Path) -> "Examined":
    """Returns data and objective for `lm eval`: those of the run that the model comes from, where no others are chosen. Rows are as long as
    the run's, or as the model's context where there is no run, unless the command line says otherwise.

    model: a model folder. Raises ConfigError, and CheckpointError where the run's config does not fit.
    """
    overrides = overrides_of(args)
    for override in overrides:
        section = path_of(override).partition(".")[0]
        if section not in EXAMINED:
            hint = did_you_mean(section, [*own_keys, *EXAMINED])
            raise ConfigError(f"{override.split('=')[0]}: lm eval has no such key. {hint}")
    run, others = RunFolder.around(model), {"data", "recipes"} & set(map(path_of, overrides))
    if others:
        saved = Layer("", "", {})
    elif run is not None:
        saved = Layer("run", str(run.config_file), flatten({key: value for key, value in run.config().items() if key in EXAMINED}))
    else:
        remedy = "Write data=text data.files=FILE, or data=stdlib"
        raise ConfigError(f"data: the model is in no run folder, so the data must be given. {remedy}.")
    composition = compose(overrides, saved)  # a mistyped key is reported before anything heavy is imported
    from lm.generation.examine import Examined

    if run is not None and not others:
        given = "data.remote" in map(path_of, overrides)
        saved.values = flatten((Examined.of_run(run) if given else Examined.of_run(run, note)).tree())
        composition = compose(overrides, saved)
    by_length, by_rows = ([layer.label for layer, _ in composition.stated(f"data.{key}")][-1:] for key in ("seq_len", "val_rows"))
    found = _told(composition, Examined)
    data = found.data
    if by_length == [SPOKEN] != by_rows and data.val_rows is not None:
        note(f"data.val_rows={data.val_rows} is left aside: all held-out text is read, the same at every data.seq_len")
        data = data.replace(val_rows=None)
    if by_length not in (["run"], [SPOKEN]):
        usual = read_config(model).get("model", {}).get("max_seq_len") if run is None else flatten(run.config()).get("data.seq_len")
        data = data.replace(seq_len=usual) if type(usual) is int else data
    return found.replace(data=data)


def _told(composition: Composition, cls: type[P]) -> P:
    found = composition.part(cls)
    composition.tell()
    return found
