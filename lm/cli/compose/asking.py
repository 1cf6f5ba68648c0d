"""The question of a study: from a recipe's block, a file, the command line, or a study that has begun."""

import os
import re
from pathlib import Path

from lm.cli.compose import catalog
from lm.cli.compose.naming import cut, differing, short, variant_names
from lm.cli.compose.overrides import expand
from lm.cli.compose.quoting import path_of, plain
from lm.errors import ConfigError
from lm.schema import Tree
from lm.spelling import did_you_mean

FROZEN = "study.json"
LONGEST = 60  # longest default name of a study or ladder


def begun_folder(study: str | None) -> Path | None:
    """Returns the folder of a begun study that is named by its path, or by that of its study.json; None for all other names."""
    path = Path(os.path.expanduser(study or ""))
    folder = path.parent if path.name == FROZEN else path
    if not study or not (folder / FROZEN).is_file():
        return None
    if path.name in (FROZEN, "", "..") and os.sep not in study:
        return folder.resolve()  # the working directory, whose parent has the ledger
    return folder if os.sep in study else None


def listed(override: str) -> str:
    """Returns an override with the values of eval.seq_len as a list, since several lengths are no variants."""
    key, _, value = override.partition("=")
    return f"{key}=[{value}]" if key == "eval.seq_len" and value[:1].isdigit() else override


def asked(study: str | None, overrides: list[str]) -> tuple[str, Tree | None]:
    """Returns a study's name, and its question from a recipe's block, a file, or overrides with several values; None: it has begun."""
    if study is None:
        return _swept(overrides)
    if study.endswith((".yaml", ".yml")):
        if not os.path.lexists(study):
            raise ConfigError(f"study={study}: there is no such file. Check the path, or name one of: {', '.join(catalog.studies())}.")
        written = catalog.read(Path(study))
        if "study" in written:
            how = f"Put it into FOLDER/recipes and write --config-dir FOLDER study={Path(study).stem}"
            raise ConfigError(f"study={study}: it is a recipe, of which a study is a part, and a recipe is chosen by its name. {how}.")
        return _fit(Path(study).stem), extended(written, [], overrides)
    found = catalog.study(study)
    if found is None and not overrides and "/" not in study:
        return study, None
    if found is None:
        rule = "no recipe of this name has a study, and none has begun in such a folder"
        raise ConfigError(f"study={study}: {rule}. {did_you_mean(study, catalog.studies())}")
    return _fit(study), extended(found, [f"recipes={plain(study)}"], overrides)


def _fit(name: str) -> str:
    """Returns the name of a file, which may have spaces, as one that a folder of runs can have."""
    return re.sub(r"[^A-Za-z0-9._,=+@-]+", "-", name).strip("-") or name


def extended(asked: Tree, before: list[str], behind: list[str]) -> Tree:
    """Returns a question with further overrides for all runs; `overrides` that are no list raise when the study is made."""
    own = asked.get("overrides", [])
    return {**asked, "overrides": [*before, *own, *behind] if isinstance(own, list) else own}


def _swept(overrides: list[str]) -> tuple[str, Tree]:
    """Returns name and question of a study with a variant for each combination of values."""
    shared, variants = varied(overrides)
    if not variants:
        raise ConfigError("ablate: there is one variant only. Name a study=, or several values of a key, as in model/ffn=swiglu,gelu.")
    keys = "+".join(short(path_of(text)) for text in overrides if text not in shared)
    return cut(f"{keys}+{'+'.join(variants)}", LONGEST), {"variants": variants, "overrides": shared}


def varied(overrides: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the overrides with a single value, and each variant's values of the others, by its name."""
    jobs = expand(overrides)
    found = differing(jobs)
    return [text for i, text in enumerate(overrides) if i not in found], variant_names(jobs) if found else {}
