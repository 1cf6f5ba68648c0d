"""The README.md of an exported model: what it is and where it comes from, and no claim beyond that."""

import json
import re
from pathlib import Path

from lm.hf.io.family import Family
from lm.nn.transformer import LM
from lm.schema import Tree
from lm.units import si

CARD = "README.md"
_HEADER = re.compile(r"---\r?\n(.*?)\n---", re.DOTALL)
_LICENSE = re.compile(
    r"""^(license|license_name|license_link):[ ]*["']?([^\s"'#][^\r\n"'#]{0,200}?)["']?[ ]*(?:[ ]#.*)?\r?$""", re.MULTILINE
)
_TASKS = {"decoder": "text-generation", "encoder": "fill-mask", "encoder_decoder": "text2text-generation"}


def stated(folder: Path, source: str) -> Tree | None:
    """Returns what the card of a model of the hub says that holds for models made of it, too: its name and its license; None where it says
    neither.  source: a folder, or the model's name there."""
    text = (folder / CARD).read_text(encoding="utf-8", errors="replace") if (folder / CARD).is_file() else ""
    header = _HEADER.match(text)
    found: Tree = {} if Path(source).expanduser().is_dir() else {"base_model": source}
    return found | dict(_LICENSE.findall(header[1]) if header else ()) or None


def model_card(saved: Tree, source: str, family: Family, model: LM, said: Tree, embeds: bool = False) -> str:
    """Returns Markdown with the header that the hub reads.  saved, source: the config and the folder that the model was read from.  said:
    what the user says of it, as in `stated`; a license goes before all that is known of one.  embeds: it is
    for vectors of texts."""
    known = {key: value for key, value in (saved.get("card") or {}).items() if "license" not in said or not key.startswith("license")}
    header = "".join(f"{key}: {json.dumps(value)}\n" for key, value in (known | said).items())
    size = sum(p.numel() for p in model.parameters())
    facts = {
        "Architecture": f"{family.architecture}, {si(size)} parameters",
        "Context": f"{model.max_seq_len:,} tokens",
        "Run": _text(saved, "run"),
        "Optimizer steps": _text(saved, "step"),
        "Started from": _text(saved, "parent"),
    }
    table = "\n".join(f"| {fact} | {value} |" for fact, value in facts.items() if value)
    library, of = ("sentence-transformers", "sentence-similarity") if embeds else ("transformers", None)
    task = of or (_TASKS[model.cfg.kind] if model.cfg.head.labels is None else "text-classification")
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: {task}\n{header}---\n\n# {name(saved, source)}\n\n"
        f"Trained with lm (slotlm) and exported to the format of transformers.\n\n| | |\n|---|---|\n{table}\n\n"
        "Intended use, training data and limits are for its author to state.\n"
    )


def name(saved: Tree, source: str) -> str:
    """Returns the name of an exported model: its run's, or else its folder's."""
    return str(saved.get("run") or Path(source).resolve().name)


def _text(saved: Tree, key: str) -> str:
    return str(saved[key]) if saved.get(key) is not None else ""
