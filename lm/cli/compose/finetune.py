"""`init_from=...`: the checkpoint's model and tokenizer replace the composed ones, and gentler settings are chosen (conf/finetune.yaml)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm.cli.compose import catalog
from lm.cli.compose.overrides import Given
from lm.cli.compose.quoting import as_text, quoted
from lm.cli.listing import known
from lm.errors import CheckpointError, ConfigError
from lm.schema import Tree, find_field, flatten, nest
from lm.storage.model_folder import meant, read_config, resolve_model

FURTHER = ("objective.teacher", "objective.reward_model")
"""Options that name a further model, which training learns from."""
SPECIALS = "tokenizer.specials"  # the one option of the tokenizer that a run with init_from has: what it adds


def with_one_parent(given: Sequence[Given]) -> list[Given]:
    """Returns the overrides with init_from=latest, or a pattern, replaced by the folder that it means now; so too those of FURTHER. The
    run's own folder, by run.name, is never meant, so that repeating the command resumes the run or finds it complete."""
    own = next((str(item.value) for item in given if item.key == "run.name"), None)
    return [
        _pinned(item, own) if item.key in ("init_from", *FURTHER) and not (item.is_delete or item.value is None) else item for item in given
    ]


def _pinned(item: Given, own: str | None) -> Given:
    path = as_text(known.root().model_fields["init_from"], item.raw, item.value)
    folder = meant(str(path), but=own)
    return item if folder == path else replace(item, text=f"{item.key}={quoted(folder)}", value=folder)


def parent_of(recipe: str | None, given: Sequence[Given]) -> str | None:
    """Returns init_from of the command line, or else of the recipe; None where there is none."""
    named = [catalog.values("recipes", recipe).get("init_from")] if recipe else [None]
    field = known.root().model_fields["init_from"]
    spoken = [item for item in given if item.key == "init_from"]
    found = [*named, *(None if item.is_delete else as_text(field, item.raw, item.value) for item in spoken)][-1]
    return None if found is None else str(found)


def gentle_choices(recipe: str | None, chosen: Mapping[str, str | None], objective_is_switched: bool) -> dict[str, str | None]:
    """Returns fine-tuning's options of `optim` and `schedule`, where the command line chooses none; {} where the recipe is itself for
    fine-tuning, with its own rate."""
    own = catalog.values("recipes", recipe) if recipe else {}
    if {"init_from", "optim.lr"} <= own.keys() and not objective_is_switched:
        return {}
    return {group: _gentle()[group] for group in ("optim", "schedule") if group not in chosen}


def gentle_values(groups: Mapping[str, str | None], choices: Mapping[str, str | None]) -> Tree:
    """Returns fine-tuning's values by dotted path for those `groups` that got its options: peak rate and warm-up, for these choices."""
    rates = _gentle()["lr" if choices["adapter"] is None else "adapter_lr"]
    found = {"optim": {"lr": rates.get(choices["objective"], rates["others"])}, "schedule": {"warmup_steps": _gentle()["warmup_steps"]}}
    return flatten({group: found[group] for group in groups})


def gentle_source() -> Path:
    """Returns the file with fine-tuning's options and values."""
    return catalog.root() / "conf" / "finetune.yaml"


def _gentle() -> Tree:
    return catalog.read(gentle_source())


def parent_values(init_from: str, given: Sequence[Given], recipe: str | None, specials: object) -> Tree:
    """Returns the checkpoint's values of `model` and `tokenizer`, by dotted path. Raises ConfigError where the command line chooses others,
    CheckpointError where there is no checkpoint.

    recipe: the recipe that has set init_from, where the command line has not.  specials: what files say of SPECIALS.
    """
    folder = _folder(init_from, given, recipe)
    _refuse_others(init_from, given)
    model = read_config(folder).get("model")
    if not isinstance(model, dict):
        raise CheckpointError(f"{folder}: its config names no model. Use a folder that lm wrote.")
    found = flatten(model, "model.") | {"tokenizer.kind": "file", "tokenizer.path": str(folder / "tokenizer.json")}
    _, field = find_field(known.root(), nest(found), SPECIALS.split("."))
    specials = next((as_text(field, item.raw, item.value) for item in given if item.key == SPECIALS and field is not None), specials)
    return found | (_with_rows(found, folder, specials) if isinstance(specials, list) and specials else {})


def _folder(init_from: str, given: Sequence[Given], recipe: str | None) -> Path:
    """Returns the checkpoint's folder. Raises CheckpointError; where a recipe names it, with the recipe that writes it."""
    try:
        return resolve_model(init_from)
    except CheckpointError as error:
        if any(item.key == "init_from" for item in given):
            raise
        makers = [name for name in catalog.groups()["recipes"] if name.replace("/", "-") == Path(init_from).name]
        makes = "".join(f" It is what lm train recipes={maker} writes." for maker in makers)
        raise CheckpointError(f"recipes={recipe}: init_from={error.sentence}{makes}") from error


def _refuse_others(init_from: str, given: Sequence[Given]) -> None:
    """Raises ConfigError where the command line chooses another model or tokenizer."""
    for item in given:
        section = item.key.replace("/", ".").split(".")[0]
        if section == "tokenizer" and item.key != SPECIALS:
            raise ConfigError(
                f"{item.text}: init_from={init_from} brings its own tokenizer, which its weights belong to. Leave it out, or add special"
                f" tokens to it by {SPECIALS}."
            )
        group, _, last = item.key.replace(".", "/").rpartition("/")
        if section == "model" and (item.is_group or (last == "kind" and group in catalog.groups())):
            raise ConfigError(
                f"{item.text}: init_from={init_from} brings its own model. Leave it out, set single keys such as model.dropout, or rebuild"
                f" the model first, by lm remodel."
            )


def _with_rows(values: Tree, folder: Path, specials: list[Any]) -> Tree:
    """Returns the vocabulary's size with rows for special tokens that are added, and what an adapter must train for these to be learned.
    Rows beyond the tokenizer's tokens are used first."""
    from lm.data.tokenizer.fitting import grown  # brings the library, which other configs need not wait for
    from lm.data.tokenizer.tokenizer import load_tokenizer
    from lm.nn.mixers.token_values import TABLE
    from lm.nn.per_layer import LAYERS_TABLE

    before = load_tokenizer(folder)
    found = grown(before, [str(name) for name in specials])
    if found is before:
        return {}
    rows = ["embed.weight"] + ["head.weight"] * (not values["model.head.tied"]) + ["head.bias"] * bool(values["model.head.bias"])
    rows += [TABLE] * ("model.attention.value_embedding.every" in values) + [LAYERS_TABLE] * ("model.embed.per_layer.channels" in values)
    return {"model.vocab_size": max(values["model.vocab_size"], found.vocab_size), "adapter.whole": rows}
