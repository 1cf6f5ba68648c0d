"""Parses the value of `sizes=`: widths, presets or overrides."""

from lm.cli.compose import catalog
from lm.cli.compose.naming import name_of
from lm.cli.compose.quoting import pieces
from lm.errors import ConfigError
from lm.schema import Tree, flatten
from lm.spelling import did_you_mean


def sizes(text: str, model: Tree) -> dict[str, list[str]]:
    """Returns the overrides of each size by its name.

    '64,96' are widths: model.d_model, with every hidden width of the model in proportion; 'micro,nano' are model presets;
    'model.n_layers=2,[model.n_layers=4,model.d_model=96]' are overrides, where brackets hold several for one size.
    model: the section that a width changes.  Raises ConfigError.
    """
    found: dict[str, list[str]] = {}
    for item in pieces(text):
        own = _overrides(item, model)
        name = name_of(own) if "=" in item else item
        if name in found:
            raise ConfigError(f"sizes: {item} is given twice. Leave one of them out.")
        found[name] = own
    return found


def _overrides(item: str, model: Tree) -> list[str]:
    if item.isascii() and item.isdigit():
        return _width(int(item), model)
    if item in catalog.groups()["model"]:
        return [f"model={item}"]
    if "=" in item:
        return pieces(item[1:-1]) if item.startswith("[") and item.endswith("]") else [item]
    rule = "is neither a width such as 96, a preset of model, nor overrides such as [model.d_model=96,model.n_layers=4]"
    raise ConfigError(f"sizes: {item[:40]!r} {rule}. {did_you_mean(item, catalog.groups()['model'])}")


def _width(width: int, model: Tree) -> list[str]:
    times = width / model["d_model"]
    hidden = {key: value for key, value in flatten(model).items() if key.rpartition(".")[2] == "hidden" and type(value) is int}
    return [f"model.d_model={width}", *(f"model.{key}={max(1, round(value * times))}" for key, value in hidden.items())]
