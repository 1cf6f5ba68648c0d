"""`init_from=...`: the checkpoint's model and tokenizer take the place of the composed ones."""

from collections.abc import Sequence
from pathlib import Path

from lm.cli.compose.overrides import Given
from lm.errors import CheckpointError, ConfigError
from lm.schema import Tree, flatten
from lm.storage.model_folder import read_config, resolve_model


def parent_values(init_from: str, given: Sequence[Given]) -> Tree:
    """What the checkpoint says of `model` and `tokenizer`, by dotted path. Raises ConfigError where the command line chooses others."""
    folder = resolve_model(init_from)
    for item in given:
        section = item.key.replace("/", ".").split(".")[0]
        if section == "tokenizer":
            raise ConfigError(f"{item.text}: init_from={init_from} brings its own tokenizer, which its weights belong to. Leave it out.")
        if section == "model" and item.is_group:
            raise ConfigError(
                f"{item.text}: init_from={init_from} brings its own model. Leave it out, or set single keys such as model.dropout."
            )
    model = read_config(folder).get("model")
    if not isinstance(model, dict):
        raise CheckpointError(f"{folder}: its config names no model. Use a folder that lm wrote.")
    return flatten(model, "model.") | flatten(_tokenizer(folder), "tokenizer.")


def _tokenizer(folder: Path) -> Tree:
    return {"kind": "file", "path": str(folder / "tokenizer.json")}
