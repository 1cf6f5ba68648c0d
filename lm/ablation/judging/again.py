"""What a study's runs were asked and made by, and the command that asks the same once more."""

import shlex

from lm.ablation.judging.alike import made_by
from lm.ablation.study import Study
from lm.plugins import COPIES
from lm.schema import Tree

_SAID = {"device": "", "torch": "torch ", "version": "lm ", "commit": "commit "}


def made(study: Study) -> Tree:
    """Returns verdict.json's entries on what was asked of every run, on the code of plugins, and on machine and versions of the runs."""
    plugins = {name: sha256 for cfg in study.variants.values() for name, sha256 in cfg.plugins.items()}
    copies = [copy for name in plugins if (study.folder / (copy := f"{COPIES}/{name}.py")).is_file()]
    return {"overrides": study.config.overrides, "plugins": plugins, "copies": copies, "made_by": made_by(study)}


def asked(found: Tree) -> dict[str, str]:
    """Returns the overrides of each variant, and of every run, as on a command line.  found: content of verdict.json."""
    rows = {name: shlex.join(row["overrides"]) or "-" for name, row in found["variants"].items()}
    return {**rows, "every run": shlex.join(found["overrides"]) or "-"}


def ran(found: Tree) -> str:
    """Returns a sentence on what made the runs."""
    by = ", ".join(_SAID[key] + " and ".join(values) for key, values in found["made_by"].items() if values)
    plugins = ", ".join(f"{name} (SHA-256 {sha256[:12]})" for name, sha256 in found["plugins"].items())
    return " ".join(filter(None, [f"The runs were made by {by}." if by else "", f"Plugins: {plugins}." if plugins else ""]))


def command(found: Tree) -> str:
    """Returns the command that runs the study once more, where its folder lies in the current one."""
    study = found["study"]
    plugins = [f"plugins={','.join(f'{study}/{copy}' for copy in found['copies'])}"] if found["copies"] else []
    return shlex.join(["lm", "ablate", f"study={study}/study.json", f"name={study}-again", *plugins])


HOW = (
    "This command runs it once more under another name, from the study's folder, of which study.json and plugins/ will do; give the path to"
    " it. The same machine and versions give the same bits."
)
