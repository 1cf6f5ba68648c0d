"""What is said of a pattern that no weight's name fits."""

from collections.abc import Sequence
from difflib import get_close_matches

from lm.errors import ConfigError
from lm.nn.transformer import ModelConfig
from lm.spelling import means


def unnamed(key: str, what: str, pattern: str, names: Sequence[str], model: ModelConfig) -> ConfigError:
    """Returns the error, with the names that are near.  key: the option that holds the pattern; what: weights, as 'weight that is ...'."""
    if model.head.tied and means(pattern, "head.weight"):
        near = "The head is the embedding (model.head.tied=true): name embed.weight"
    else:
        near = f"Near are {', '.join(get_close_matches(pattern, names, 5, 0))}"
    return ConfigError(f"{key}: no {what} has a name like '{pattern}'. {near}.")
