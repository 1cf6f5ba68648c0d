"""`from=FOLDER`, which every verb that reads a model takes; a class cannot have a field of that name."""

from collections.abc import Sequence

from lm.errors import ConfigError

HELP = "from  text [none, must be set]  Run, model or checkpoint folder."


def take_from(verb: str, args: Sequence[str]) -> tuple[str, list[str]]:
    """The folder, and the other arguments. Raises ConfigError unless it is given once."""
    given = [arg.removeprefix("from=") for arg in args if arg.startswith("from=")]
    if not given or not given[0]:
        others = " ".join(arg for arg in args if not arg.startswith("traceback="))
        instead = f" ({others[:80]} names none)" if others else ""
        raise ConfigError(f"from: no model was given{instead}, and one is needed. Write lm {verb} from=runs/NAME.")
    if len(given) > 1:
        raise ConfigError(f"from: it was given {len(given)} times ({', '.join(given)}), and one model is read. Give it once.")
    return given[0], [arg for arg in args if not arg.startswith("from=")]
